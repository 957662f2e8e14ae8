"""Predictions for every row of a file: the rows come back as they were, with columns added."""

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.data.bad_rows import BadRows
from trimtab.data.files import read_file
from trimtab.errors import DataError
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.inputs import inputs_of
from trimtab.inference.load import Loaded

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_JSON_LINES = (".jsonl", ".ndjson")


def predict_file(
    loaded: Loaded,
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    text: str | Sequence[str] | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    max_new_tokens: int = 128,
) -> int:
    """Predict for every row of a file and write the rows, in their order, with what was predicted.

    A classifier adds `prediction` and `score`, other models `prediction`. The output appears whole or not at all.

    Args:
        loaded: The model.
        in_path: A csv, tsv, jsonl, json, parquet or txt file.
        out_path: A csv, tsv or jsonl file, which is replaced if it exists.
        text: The column of the texts, or several (pairs, parts of a prompt); by default as in training, or guessed.
        batch_size: Rows at a time.
        max_length: Tokens after which a text is cut, for models that do not write; by default as in training.
        max_new_tokens: The most tokens that a model which writes may write.

    Returns:
        The number of rows.
    """
    source, target = Path(in_path), Path(out_path)
    if target.suffix.lower() not in (*_DELIMITERS, *_JSON_LINES):
        raise DataError(f"predictions cannot be written to {target}", "name a .csv, .tsv or .jsonl file")
    if not target.parent.is_dir():
        raise DataError(f"there is no folder {target.parent} to write {target.name} to", f"mkdir -p {target.parent}")
    if target.exists() and source.exists() and target.samefile(source):
        raise DataError(f"{target} is the input, which the predictions would replace", "name another output")
    rows = read_file(source, BadRows("stop"))  # numbers in csv stay the text that they are
    if not len(rows):
        raise DataError(f"{source} has no rows", "give a file with at least one row")
    texts = inputs_of(loaded, rows, text)
    added: dict[str, list[Any]]
    if loaded.task_name == "classify":
        predictions = classify_texts(loaded, texts, batch_size, max_length=max_length)
        added = {"prediction": [p.label for p in predictions], "score": [round(p.score, 6) for p in predictions]}
    elif loaded.task_name == "regress":
        added = {"prediction": regress_texts(loaded, texts, batch_size, max_length=max_length)}
    else:
        added = {"prediction": generate_texts(loaded, texts, max_new_tokens, batch_size=batch_size)}
    columns = rows.columns | {_free(name, rows.names): values for name, values in added.items()}
    _write(target, columns)
    return len(rows)


def _free(name: str, taken: Sequence[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate


def _write(target: Path, columns: dict[str, list[Any]]) -> None:
    names, rows = list(columns), list(zip(*columns.values(), strict=True))
    buffer = io.StringIO(newline="")
    suffix = target.suffix.lower()
    if suffix in _JSON_LINES:
        for row in rows:
            buffer.write(json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False, default=str) + "\n")
    else:
        writer = csv.writer(buffer, delimiter=_DELIMITERS[suffix], lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_cell(value) for value in row] for row in rows)
    beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8", newline="") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, tuple):  # several labels
        return "; ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value
