"""Convert lines of the journal into rows of MLflow's metrics table."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.tracking.mlflow.server import Row, valid_key


def rows_of(text: bytes, renamed: dict[str, str] | None = None) -> list[Row]:
    """Return the numbers of a line of the journal; text values, the config and damaged lines give none.

    Args:
        text: The line.
        renamed: Receives the names that MLflow does not accept, with the names used instead.
    """
    try:
        line = json.loads(text)
        timestamp_ms = round(line["time"] * 1000)
        step = line.get("step") or 0
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    if "config" in line and "step" not in line:
        return []
    rows = []
    for name, value in _numbers({key: value for key, value in line.items() if key not in ("time", "step")}):
        key = valid_key(name)
        if renamed is not None and key != name:
            renamed[name] = key
        rows.append(Row(key, value, timestamp_ms, step))
    return rows


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity"):
            yield f"{prefix}{key}", float(value)
