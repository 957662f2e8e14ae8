"""Predict for every row of a file, and write the rows unchanged, with columns for the predictions."""

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.folder import refuse_impossible, write_file
from trimtab.data.bad_rows import BadRows
from trimtab.data.files import read_file
from trimtab.data.rows import RowLocations, Rows
from trimtab.data.tasks.labels import as_number
from trimtab.errors import DataError, as_argument
from trimtab.inference.classify import classify_texts, regress_texts
from trimtab.inference.generate import generate_texts
from trimtab.inference.inputs import read_inputs
from trimtab.inference.load import LoadedModel
from trimtab.log import say

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"


def predict_file(
    loaded: LoadedModel,
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    safe_csv: bool = False,
    **settings: Any,
) -> int:
    """Predict for every row of a file and write the rows, in order, with the predictions. The write is atomic.

    Args:
        loaded: The model.
        in_path: A csv, tsv, jsonl, json, parquet or txt file.
        out_path: A csv, tsv, jsonl or parquet file.
        overwrite: Whether an existing output is replaced; otherwise it is an error.
        safe_csv: Whether cells of a csv or tsv file that a spreadsheet would compute as formulas get an apostrophe.
        settings: Arguments of `predict_rows`.

    Returns:
        The number of rows.
    """
    source, target = Path(in_path), Path(out_path)
    check_files(source, target, overwrite=overwrite, safe_csv=safe_csv)
    rows = read_file(source, BadRows("stop"))  # numbers in csv stay text, so they are written unchanged
    columns = predict_rows(loaded, rows, **settings)
    _write(target, columns, safe_csv)
    return len(rows)


def check_files(source: Path, target: Path, *, overwrite: bool, safe_csv: bool = False) -> None:
    """Reject an output that cannot be written; cheap enough to call before a model is loaded."""
    refuse_impossible(target)
    kinds = (*_DELIMITERS, *_JSON_LINES, _PARQUET)
    if target.suffix.lower() not in kinds:
        raise DataError(
            f"predictions cannot be written to {target}", f"choose a file name that ends in {', '.join(kinds)}"
        )
    if safe_csv and target.suffix.lower() not in _DELIMITERS:
        raise DataError(
            f"--safe-csv has no effect on {target}: only csv and tsv files are opened by spreadsheets as text",
            "remove --safe-csv (safe_csv=True)",
        )
    if not target.parent.is_dir():
        raise DataError(f"the folder of {target} does not exist", f"mkdir -p {as_argument(target.parent)}")
    if target.is_dir():
        raise DataError(f"{target} is a folder", "pass a file name")
    if source.suffix and not source.exists():
        raise DataError(f"{source} cannot be read: No such file or directory", "check the path")
    if not target.exists():
        return
    if source.exists() and target.samefile(source):
        raise DataError(f"{target} is also the input file", "choose another output file")
    if not overwrite:
        raise DataError(f"{target} exists", "choose another output file, or add --overwrite (overwrite=True)")


def predict_rows(
    loaded: LoadedModel,
    rows: Rows,
    *,
    text: str | Sequence[str] | None = None,
    batch_size: int = 32,
    max_length: int | None = None,
    max_new_tokens: int = 128,
    probabilities: bool = False,
) -> dict[str, list[Any]]:
    """Return the columns of the rows and of the predictions.

    A classifier adds `prediction` and `score`, other models `prediction`; a row without a text gets None.

    Args:
        loaded: The model.
        rows: The rows.
        text: The column of the texts, or several (pairs, parts of a prompt); by default as in training, or guessed.
        batch_size: Rows per batch.
        max_length: Truncate texts to this number of tokens, for classification and regression; by default as in
            training.
        max_new_tokens: Maximum number of tokens to generate.
        probabilities: Whether a classifier adds a column `probability_LABEL` for every label.
    """
    if not len(rows):
        raise DataError(f"{rows.origin} has no rows", "add at least one row")
    if probabilities and loaded.task_name != "classify":
        raise DataError(f"a {loaded.task_name} model has no class probabilities", "remove --probabilities")
    inputs = read_inputs(loaded, rows, text)
    filled = [index for index, one in enumerate(inputs) if one is not None]
    if len(filled) < len(rows):
        first = rows.location(next(index for index, one in enumerate(inputs) if one is None))
        num_empty = len(rows) - len(filled)
        say(f"{num_empty:,} of {len(rows):,} rows have no text and get no prediction; the first: {first}")
    texts = [inputs[index] for index in filled]
    found: dict[str, list[Any]]
    if loaded.task_name == "classify":
        predictions = classify_texts(loaded, texts, batch_size, max_length=max_length)
        found = {"prediction": [p.label for p in predictions], "score": [round(p.score, 6) for p in predictions]}
        for name in loaded.model.config.id2label.values() if probabilities else ():
            found[f"probability_{name}"] = [round(p.scores[str(name)], 6) for p in predictions]
    elif loaded.task_name == "regress":
        found = {"prediction": regress_texts(loaded, texts, batch_size, max_length=max_length)}
    else:
        found = {"prediction": generate_texts(loaded, texts, max_new_tokens, batch_size=batch_size)}
    return rows.columns | {
        _unused_name(name, rows.names): _scatter(values, filled, len(rows)) for name, values in found.items()
    }


def predict_lines(loaded: LoadedModel, text: str, **settings: Any) -> str:
    """Predict for each non-blank line of a text and return JSON lines; the settings are those of `predict_rows`."""
    # Not splitlines: it also splits at characters that may be part of a text.
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    locations = RowLocations.of("standard input, line", (number for number, _ in numbered))
    rows = Rows({"text": [line for _, line in numbered]}, "standard input", locations=locations)
    return _json_lines(predict_rows(loaded, rows, text="text", **settings))


def _scatter(values: Sequence[Any], indices: Sequence[int], num_rows: int) -> list[Any]:
    """Return a column with the values at their rows and None elsewhere."""
    by_index = dict(zip(indices, values, strict=True))
    return [by_index.get(index) for index in range(num_rows)]


def _json_lines(columns: dict[str, list[Any]]) -> str:
    """Format one JSON object per row and line."""
    records = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
    return "".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)


def _unused_name(name: str, taken: Sequence[str]) -> str:
    number = 1
    while (candidate := name if number == 1 else f"{name}_{number}") in taken:
        number += 1
    return candidate


def _write(target: Path, columns: dict[str, list[Any]], safe_csv: bool) -> None:
    try:
        write_file(target, _encode(target.suffix.lower(), columns, safe_csv))
    except OSError as error:
        raise DataError(
            f"{target} cannot be written: {error.strerror or error}",
            cure_for_os_error(error, "choose another output file"),
        ) from error


def _encode(suffix: str, columns: dict[str, list[Any]], safe_csv: bool) -> bytes:
    if suffix == _PARQUET:
        return _parquet(columns)
    if suffix in _JSON_LINES:
        return _json_lines(columns).encode()
    buffer = io.StringIO(newline="")
    writer = csv.writer(buffer, delimiter=_DELIMITERS[suffix], lineterminator="\n")
    shown = _without_formula if safe_csv else _cell
    writer.writerow([shown(name) for name in columns])
    writer.writerows([shown(value) for value in row] for row in zip(*columns.values(), strict=True))
    return buffer.getvalue().encode()


def _parquet(columns: dict[str, list[Any]]) -> bytes:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    buffer = io.BytesIO()
    try:
        parquet.write_table(pyarrow.table({name: _to_one_type(values) for name, values in columns.items()}), buffer)
    except (pyarrow.ArrowException, OverflowError) as error:
        raise DataError(f"the rows cannot be written as parquet: {error}", "write a .jsonl file") from error
    return buffer.getvalue()


def _to_one_type(values: list[Any]) -> list[Any]:
    """Return a column of one type, as parquet needs: mixed values become text."""
    plain = [list(value) if isinstance(value, tuple) else value for value in values]
    kinds = {type(value) for value in plain if value is not None}
    return plain if len(kinds) <= 1 or kinds == {int, float} else [None if v is None else str(v) for v in plain]


def _without_formula(value: Any) -> Any:
    """Return a cell that no spreadsheet computes: text that begins like a formula gets an apostrophe."""
    cell = _cell(value)
    is_formula = isinstance(cell, str) and cell.startswith(_FORMULA) and as_number(cell) is None
    return f"'{cell}" if is_formula else cell


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, tuple):  # several labels
        return "; ".join(map(str, value))
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value
