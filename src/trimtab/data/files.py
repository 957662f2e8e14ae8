"""Read one file to `Rows`: csv, tsv, jsonl, json, parquet, arrow and txt, plain or gzipped.

An invalid line raises an error with file and line, or is skipped and counted. Text is UTF-8, or UTF-16 with a byte
order mark; a row with other bytes is a bad row.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trimtab.data.bad_rows import NESTED_TOO_DEEPLY, SKIP_CURE, BadRows, is_nested_too_deeply
from trimtab.data.delimited import parse_csv, parse_tsv
from trimtab.data.rows import RowLocations, Rows
from trimtab.errors import DataError

Record = dict[str, Any]
# Record and its line or row number.
Numbered = list[tuple[int, Record]]


def file_format(path: Path) -> str | None:
    """Return the format of a file by its extension, or None if it is not supported."""
    name = path.name.lower().removesuffix(".gz")
    return _FORMATS.get(name.rpartition(".")[2]) if "." in name else None


def require_format(path: Path) -> str:
    """Return the format of a file.

    Raises:
        DataError: If it is not supported.
    """
    found = file_format(path)
    if found is None:
        raise DataError(f"{path}: unsupported file format", f"use one of {', '.join(sorted(_FORMATS))}")
    return found


def read_file(path: Path, bad: BadRows) -> Rows:
    """Read the rows of one file; numbers in csv and tsv stay text.

    Raises:
        DataError: If the file, or a row of it, cannot be read.
    """
    found = require_format(path)
    data = _read_bytes(path)
    if found in _BINARY:
        return _BINARY[found](data, str(path))
    return _PARSERS[found](_decode(data, str(path), bad), str(path), bad)


def read_text(path: Path, bad: BadRows) -> str | None:
    """Return the text of a file, or None for a bad row.

    Raises:
        DataError: If the file cannot be read.
    """
    text = _decode(_read_bytes(path), str(path), bad)
    if bad.has_escaped_bytes(text):
        bad.add(str(path), "not UTF-8", "")
        return None
    return text


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
    if path.suffix.lower() != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is not a complete gzip file: {error}", "copy or download it again") from error


def _decode(data: bytes, name: str, bad: BadRows) -> str:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16", errors="replace")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if bad.skips:
            return data.decode("utf-8-sig", errors="surrogateescape")
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{name}, line {line}: not UTF-8 (byte 0x{data[error.start]:02x})",
            f"save the file as UTF-8 (for example with: iconv -f latin1 -t utf-8), {SKIP_CURE}",
        ) from error


def _rows_of(records: Sequence[tuple[int, Record]], origin: str, unit: str) -> Rows:
    """Convert numbered records to columns; keys that a record lacks are None."""
    names = dict.fromkeys(name for _, record in records for name in record)
    columns = {name: [record.get(name) for _, record in records] for name in names}
    locations = RowLocations.of(f"{origin}, {unit}", (number for number, _ in records))
    return Rows(columns, origin, locations=locations)


def _parse_jsonl(text: str, name: str, bad: BadRows) -> Rows:
    records: Numbered = []
    cure = "write one JSON object per line"
    # Not splitlines: it also splits at characters that are valid inside a JSON string.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        location = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(location, _json_problem(error), cure)
            continue
        if not isinstance(record, dict):
            bad.add(location, f"a JSON {type(record).__name__}, expected an object", cure)
        elif bad.has_escaped_bytes(line):
            bad.add(location, "not UTF-8", "")
        elif _has_lone_surrogates(line, record):
            bad.add(location, "half of a surrogate pair (a lone \\ud8.. or \\udc..)", "write both halves")
        elif is_nested_too_deeply(record):
            bad.add(location, NESTED_TOO_DEEPLY, "write fewer levels")
        else:
            records.append((number, record))
    return _rows_of(records, name, "line")


def _json_problem(error: Exception) -> str:
    """Describe why JSON cannot be parsed; Python's message for very long integers names a limit that does not help."""
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON ({error})"
    if isinstance(error, RecursionError):
        return "JSON nested too deeply"
    return "a number with thousands of digits; write it in quotes"


def _has_lone_surrogates(line: str, record: Any) -> bool:
    """Whether JSON escapes contain half of a surrogate pair, which tokenizers reject."""
    if "\\ud" not in line and "\\uD" not in line:
        return False
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _parse_json(text: str, name: str, bad: BadRows) -> Rows:
    """Parse a list of objects, an object of columns, or an object with one list of objects."""
    cure = "write a list of objects: [{...}, {...}]"
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _parse_jsonl(text, name, bad)  # many .json files have one object per line
        raise DataError(f"{name}, line {error.lineno}: {_json_problem(error)}", cure) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: {_json_problem(error)}", cure) from error
    if isinstance(content, dict) and len(content) == 1:
        inner = next(iter(content.values()))
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            content = inner
    if isinstance(content, dict) and content and all(isinstance(values, list) for values in content.values()):
        if is_nested_too_deeply(content):
            raise DataError(f"{name}: {NESTED_TOO_DEEPLY}", "write fewer levels")
        return Rows(content, name)
    if not isinstance(content, list):
        kind = "object" if isinstance(content, dict) else type(content).__name__
        raise DataError(f"{name}: a JSON {kind} without rows", cure)
    return from_objects(content, name, bad, cure)


def from_objects(objects: Iterable[Any], origin: str, bad: BadRows, cure: str) -> Rows:
    """Convert dicts to `Rows`; other objects are bad rows."""
    records: Numbered = []
    for number, record in enumerate(objects, 1):
        if is_nested_too_deeply(record):
            bad.add(f"{origin}, row {number}", NESTED_TOO_DEEPLY, "write fewer levels")
        elif isinstance(record, dict):
            records.append((number, record))
        else:
            bad.add(f"{origin}, row {number}", f"a {type(record).__name__}, expected a dict", cure)
    return _rows_of(records, origin, "row")


def _parse_txt(text: str, name: str, bad: BadRows) -> Rows:
    """Split at blank lines; in a file without blank lines between others, each line is a text."""
    lines = text.replace("\r\n", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    by_blank_lines = bool(filled) and filled[-1] - filled[0] + 1 > len(filled)
    texts: list[tuple[int, list[str]]] = []  # first line number, lines
    previous = -1
    for number in filled:
        if by_blank_lines and number == previous + 1 and texts:
            texts[-1][1].append(lines[number])
        else:
            texts.append((number + 1, [lines[number]]))
        previous = number
    records: Numbered = []
    for number, text_lines in texts:
        if any(map(bad.has_escaped_bytes, text_lines)):
            bad.add(f"{name}, line {number}", "not UTF-8", "")
        else:
            records.append((number, {"text": "\n".join(text_lines)}))
    return _rows_of(records, name, "line")


def _parse_parquet(data: bytes, name: str) -> Rows:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        # Use only this thread: a thread of Arrow's pools that still holds Python objects at interpreter exit aborts the
        # process, and the exit code is lost.
        table = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False).read(use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{name} is not a complete parquet file: {str(error).splitlines()[0]}", "write it again"
        ) from error
    return Rows(table.to_pydict(), name, _label_names(table.schema.metadata or {}))


def _parse_arrow(data: bytes, name: str) -> Rows:
    import pyarrow
    from pyarrow import ipc

    try:
        try:
            table = ipc.open_stream(data).read_all()  # as the `datasets` library writes them
        except pyarrow.ArrowInvalid:
            table = ipc.open_file(data).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{name} is not a complete arrow file: {str(error).splitlines()[0]}", "write it again"
        ) from error
    return Rows(table.to_pydict(), name, _label_names(table.schema.metadata or {}))


def _label_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """Read the class names that the `datasets` library stores in a parquet file."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        inner = {name: feature.get("feature", feature) for name, feature in features.items()}
        return {name: list(f["names"]) for name, f in inner.items() if f.get("_type") == "ClassLabel"}
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}  # metadata of another tool


_PARSERS: dict[str, Callable[[str, str, BadRows], Rows]] = {
    "csv": parse_csv,
    "tsv": parse_tsv,
    "jsonl": _parse_jsonl,
    "json": _parse_json,
    "txt": _parse_txt,
}
_BINARY: dict[str, Callable[[bytes, str], Rows]] = {"parquet": _parse_parquet, "arrow": _parse_arrow}
_FORMATS = {name: name for name in (*_PARSERS, *_BINARY)} | {"ndjson": "jsonl"}
