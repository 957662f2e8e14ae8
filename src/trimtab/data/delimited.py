"""Comma- and tab-separated text to `Rows`, with the line of every row; numbers become numbers by whole columns."""

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from trimtab.data.bad_rows import BadRows
from trimtab.data.rows import Places, Rows
from trimtab.errors import DataError
from trimtab.log import say_once

_INTEGER = re.compile(r"[+-]?(0|[1-9][0-9]*)", re.ASCII)  # 007 is a name, not a number
_FLOAT = re.compile(r"[+-]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?", re.ASCII)
_MISSING = frozenset({"", "NA", "N/A", "NaN", "nan", "null", "NULL", "None"})
# Written by a csv library into a tab-separated file: quoted, with every quote inside doubled, and at least one.
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')
_LONGEST_NUMBER = 1000  # characters; Python reads no whole number of more than 4,300 digits
_MOST_SHOWN = 20
_FIELD_LIMIT = 2**31 - 1  # the csv module stops at 131,072 characters, which a document may well have


class _Lines:
    """The lines of a text, to be read again from any of them."""

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
    """Comma-separated text; semicolons or tabs are taken where the header has them and no comma."""
    lines = _Lines(text)
    header = next((line for line in lines.lines if line.strip()), "")
    delimiter = "," if "," in header else ";" if ";" in header else "\t" if "\t" in header else ","
    if delimiter != ",":
        say_once(f"the csv has {'semicolons' if delimiter == ';' else 'tabs'} between its fields")
    # A header written "text, label" tells that rows are written so too.
    spaced = delimiter != "\t" and all(part.startswith(" ") for part in header.split(delimiter)[1:])
    return _rows(_records(lines, name, bad, delimiter, spaced), name, bad)


def parse_tsv(text: str, name: str, bad: BadRows) -> Rows:
    """Tab-separated text. Quotes are letters like any other where every line then has the fields of the header."""
    lines = _Lines(text)
    plain = [(number, line.rstrip("\r\n").split("\t")) for number, line in enumerate(lines.lines, 1) if line.strip()]
    if not plain or plain[0][1][0].startswith('"') or len({len(fields) for _, fields in plain}) > 1:
        return _rows(_records(lines, name, bad, "\t", False), name, bad)
    unquoted = ((number, [_unquoted(field) for field in fields]) for number, fields in plain)
    return _rows(unquoted, name, bad)


def _unquoted(field: str) -> str:
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
    """The fields of each record with the line that it begins on."""
    reader = csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=spaced)
    while True:
        start = lines.position
        try:
            with _long_fields():
                fields = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            bad.add(f"{name}, line {start + 1}", f"broken quotes ({error})", 'write a quote inside quotes twice: ""')
            lines.position = start + 1  # an open quote must not swallow the good lines that follow
            continue
        if fields:
            yield start + 1, fields


def _rows(records: Iterator[tuple[int, list[str]]], name: str, bad: BadRows) -> Rows:
    _, header = next(records, (0, []))
    names = [field.strip() or f"column_{index}" for index, field in enumerate(header, 1)]
    twice = sorted(column for column, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{name}: the header has {_some(twice)} more than once", "give every column its own name")
    kept: list[list[str]] = []
    numbers: list[int] = []
    for number, fields in records:
        if len(fields) != len(names):
            problem = f"{len(fields)} field(s) where the header has {len(names)} ({_some(names)})"
            bad.add(f"{name}, line {number}", problem, "put fields that hold a separator in quotes")
        elif bad.skips and any(bad.has_escaped_bytes(field) for field in fields):
            bad.add(f"{name}, line {number}", "not UTF-8", "")
        else:
            kept.append(fields)
            numbers.append(number)
    values = [list(column) for column in zip(*kept, strict=True)] or [[] for _ in names]
    return Rows(dict(zip(names, values, strict=True)), name, places=Places.of(f"{name}, line", numbers))


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:_MOST_SHOWN])
    return shown if len(names) <= _MOST_SHOWN else f"{shown} and {len(names) - _MOST_SHOWN:,} more"


def with_numbers(rows: Rows) -> Rows:
    """The same rows, with columns that hold numbers alone made numbers, and what is missing in them None."""
    columns = {name: _as_numbers(values) for name, values in rows.columns.items()}
    return Rows(columns, rows.origin, rows.label_names, rows.places)


def _as_numbers(values: list[str]) -> list[Any]:
    kinds: tuple[tuple[re.Pattern[str], Callable[[str], Any]], ...] = ((_INTEGER, int), (_FLOAT, float))
    for pattern, convert in kinds:
        found = False
        for value in values:
            stripped = value.strip()
            if stripped in _MISSING:
                continue
            found = True
            if len(stripped) > _LONGEST_NUMBER or not pattern.fullmatch(stripped):
                break
        else:
            if not found:
                return values
            return [None if value.strip() in _MISSING else convert(value) for value in values]
    return list(values)
