"""Parse csv and tsv text to `Rows`, with the line of every row, and convert columns of numbers."""

import csv
import dataclasses
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.data.bad_rows import BadRows
from trimtab.data.rows import RowLocations, Rows
from trimtab.errors import DataError
from trimtab.log import log_info_once

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)", re.ASCII)  # 007 is an identifier, not a number
_FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"})
# A field that a csv library wrote into a tsv file: quoted, with at least one doubled quote inside.
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
_MAX_DIGITS = 1000  # characters; int() raises above 4,300 digits
_MAX_NAMES_SHOWN = 20
_FIELD_LIMIT = 2**31 - 1  # the csv module's default of 131,072 characters is less than some documents have


class _Lines:
    """An iterator over the lines of a text whose position can be set."""

    def __init__(self, text: str) -> None:
        self.lines = list(io.StringIO(text, newline=""))
        self.position = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self.position == len(self.lines):
            raise StopIteration
        self.position += 1
        return self.lines[self.position - 1]


def parse_csv(text: str, name: str, bad: BadRows) -> Rows:
    """Parse comma-separated text; the delimiter is semicolon or tab if the header has these and no comma."""
    lines = _Lines(text)
    header = next((line for line in lines.lines if line.strip()), "")
    delimiter = "," if "," in header else ";" if ";" in header else "\t" if "\t" in header else ","
    if delimiter != ",":
        log_info_once(f"the csv file is delimited by {'semicolons' if delimiter == ';' else 'tabs'}")
    # After a header such as "text, label", rows have spaces after commas too.
    spaced = delimiter != "\t" and all(part.startswith(" ") for part in header.split(delimiter)[1:])
    return _rows_of(_records(lines, name, bad, delimiter, spaced), name, bad)


def parse_tsv(text: str, name: str, bad: BadRows) -> Rows:
    """Parse tab-separated text. Quotes are literal if every line then has as many fields as the header."""
    lines = _Lines(text)
    plain = [(number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines.lines, 1) if line.strip()]
    if not plain or plain[0][1][0].startswith('"') or len({len(fields) for _, fields in plain}) > 1:
        return _rows_of(_records(lines, name, bad, "\t", False), name, bad)
    return _rows_of(((number, [_unquote(field) for field in fields]) for number, fields in plain), name, bad)


def _unquote(field: str) -> str:
    if '""' in field and _QUOTED.fullmatch(field):
        return field[1:-1].replace('""', '"')
    return field


@contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_FIELD_LIMIT)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _records(lines: _Lines, name: str, bad: BadRows, delimiter: str, spaced: bool) -> Iterator[tuple[int, list[str]]]:
    """Yield the fields of each record with the number of its first line."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=spaced)
    while True:
        start = lines.position
        try:
            with _long_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.add(f"{name}, line {start + 1}", f"invalid quotes ({error})", 'write a quote inside quotes twice: ""')
            lines.position = start + 1  # an unclosed quote must not swallow the valid lines after it
            continue
        if fields:
            yield start + 1, fields


def _rows_of(records: Iterator[tuple[int, list[str]]], name: str, bad: BadRows) -> Rows:
    _, header = next(records, (0, []))
    names = [field.strip() or f"column_{index}" for index, field in enumerate(header, 1)]
    twice = sorted(column for column, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{name}: the header has {_shorten(twice)} more than once", "give every column its own name")
    kept: list[list[str]] = []
    numbers: list[int] = []
    for number, fields in records:
        if len(fields) != len(names):
            problem = f"{len(fields)} field(s), but the header has {len(names)} ({_shorten(names)})"
            bad.add(f"{name}, line {number}", problem, "quote fields that contain the delimiter")
        elif bad.skips and any(map(bad.has_escaped_bytes, fields)):
            bad.add(f"{name}, line {number}", "not UTF-8", "")
        else:
            kept.append(fields)
            numbers.append(number)
    values = [list(column) for column in zip(*kept, strict=True)] or [[] for _ in names]
    locations = RowLocations.of(f"{name}, line", numbers)
    return Rows(dict(zip(names, values, strict=True)), name, locations=locations)


def _shorten(names: list[str]) -> str:
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return shown if len(names) <= _MAX_NAMES_SHOWN else f"{shown} and {len(names) - _MAX_NAMES_SHOWN:,} more"


def convert_numbers(rows: Rows) -> Rows:
    """Convert columns that contain only numbers; missing values in them become None."""
    return dataclasses.replace(rows, columns={name: _to_numbers(values) for name, values in rows.columns.items()})


def _to_numbers(values: list[str]) -> list[Any]:
    present = [stripped for value in values if (stripped := value.strip()) not in _MISSING]
    kinds: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = ((_INTEGER, int), (_FLOAT, float))
    for pattern, convert in kinds:
        if present and all(len(value) <= _MAX_DIGITS and pattern.fullmatch(value) for value in present):
            return [None if value.strip() in _MISSING else convert(value) for value in values]
    return values
