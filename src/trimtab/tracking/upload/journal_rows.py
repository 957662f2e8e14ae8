"""The journal of a run as rows of MLflow's table: line by line, also while it is being written."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trimtab.tracking.mlflow.server import Row

MAX_READ_BYTES = 1 << 20
_NOT_NUMBERS = {"time", "step"}


def rows_of(text: bytes) -> list[Row]:
    """The numbers of a line of the journal. Notes and other texts are none; those that JSON has no word for are."""
    try:
        line = json.loads(text)
        moment = round(line["time"] * 1000)
        step = line.get("step") or 0
    except (ValueError, LookupError, TypeError, AttributeError):  # not ours, or damaged
        return []
    if "config" in line and "step" not in line:
        return []
    values = {key: value for key, value in line.items() if key not in _NOT_NUMBERS}
    return [Row(key, value, moment, step) for key, value in _numbers(values)]


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity"):
            yield f"{prefix}{key}", float(value)


def whole_lines(path: Path, start: int, *, whole: bool = False) -> Iterator[tuple[bytes, int]]:
    """Lines of a file from an offset on, each with the offset of its end; one that is being written is none yet."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            text = file.read() if whole else file.read(MAX_READ_BYTES)
            if not whole and b"\n" not in text:
                text += file.readline()
    except FileNotFoundError:
        return
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            start += len(line)
            yield line, start
