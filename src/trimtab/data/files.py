"""One file to `Rows`: csv, tsv, jsonl, json, parquet and txt, plain or gzipped.

A broken line is an error that names file and line, or is skipped and counted. Text is UTF-8 (or UTF-16 with its mark);
a byte that is not makes its row a broken one.
"""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trimtab.data.bad_rows import SKIP_CURE, BadRows
from trimtab.data.delimited import parse_csv, parse_tsv
from trimtab.data.rows import Places, Rows
from trimtab.errors import DataError


def kind_of(path: Path) -> str | None:
    """The kind of a file by the end of its name, or None where it is none that can be read."""
    name = path.name.lower().removesuffix(".gz")
    return _KINDS.get(name.rpartition(".")[2]) if "." in name else None


def check_kind(path: Path) -> str:
    """The kind of a file that can be read.

    Raises:
        DataError: If it is of no such kind.
    """
    kind = kind_of(path)
    if kind is None:
        raise DataError(f"{path}: files of this kind cannot be read", f"give one of {', '.join(sorted(_KINDS))}")
    return kind


def read_file(path: Path, bad: BadRows) -> Rows:
    """The rows of one file; numbers in csv and tsv are still text.

    Raises:
        DataError: If the file, or a row of it, cannot be read.
    """
    kind = check_kind(path)
    data = _bytes_of(path)
    if kind == "parquet":
        return _parse_parquet(data, str(path))
    return _PARSERS[kind](_decoded(data, str(path), bad), str(path), bad)


def _bytes_of(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "check the path and its permissions") from error
    if path.suffix.lower() != ".gz":
        return data
    try:
        return gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is no whole gzip file: {error}", "copy or download it again") from error


def _decoded(data: bytes, name: str, bad: BadRows) -> str:
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


def from_records(records: Sequence[dict[str, Any]], origin: str, places: Places | None = None) -> Rows:
    """Dicts to columns; a key that some rows lack is None there."""
    names = dict.fromkeys(name for record in records for name in record)
    return Rows({name: [record.get(name) for record in records] for name in names}, origin, places=places)


def _parse_jsonl(text: str, name: str, bad: BadRows) -> Rows:
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    cure = "write one JSON object on each line"
    # Not splitlines: it also cuts at characters that may stand inside a JSON text.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        place = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad.add(place, _why_not_json(error), cure)
            continue
        if not isinstance(record, dict):
            bad.add(place, f"a JSON {type(record).__name__} where an object is expected", cure)
        elif bad.has_escaped_bytes(line):
            bad.add(place, "not UTF-8", "")
        elif _has_half_characters(line, record):
            bad.add(place, "half of a character (a lone \\ud8.. or \\udc..)", "write the character whole")
        else:
            records.append(record)
            numbers.append(number)
    return from_records(records, name, Places.of(f"{name}, line", numbers))


def _why_not_json(error: Exception) -> str:
    """Python reads no number of thousands of digits, and says how to lift that limit; nobody meant such a number."""
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error})"
    if isinstance(error, RecursionError):
        return "values inside of values, too many levels deep"
    return "a number of thousands of digits; in quotes it is text"


def _has_half_characters(line: str, record: Any) -> bool:
    """Whether JSON escapes give half a surrogate pair, which no tokenizer takes."""
    if "\\ud" not in line and "\\uD" not in line:
        return False
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _parse_json(text: str, name: str, bad: BadRows) -> Rows:
    """A list of objects, an object of columns, or an object that holds one list of objects."""
    cure = "write a list of objects: [{...}, {...}]"
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            return _parse_jsonl(text, name, bad)  # many files named .json have an object on each line
        raise DataError(f"{name}, line {error.lineno}: no JSON ({error})", cure) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name}: {_why_not_json(error)}", cure) from error
    if isinstance(content, dict) and len(content) == 1:
        inner = next(iter(content.values()))
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            content = inner
    if isinstance(content, dict) and content and all(isinstance(values, list) for values in content.values()):
        return Rows(content, name)
    if not isinstance(content, list):
        raise DataError(f"{name}: a JSON {type(content).__name__} that holds no rows", cure)
    return from_objects(content, name, bad, cure)


def from_objects(objects: Iterable[Any], origin: str, bad: BadRows, cure: str) -> Rows:
    """Dicts to `Rows`; anything else among them is a bad row."""
    records: list[dict[str, Any]] = []
    numbers: list[int] = []
    for number, record in enumerate(objects, 1):
        if isinstance(record, dict):
            records.append(record)
            numbers.append(number)
        else:
            bad.add(f"{origin}, row {number}", f"a {type(record).__name__} where a dict is expected", cure)
    return from_records(records, origin, Places.of(f"{origin}, row", numbers))


def _parse_txt(text: str, name: str, bad: BadRows) -> Rows:
    """Texts that blank lines separate; where there are none between lines, each line is a text."""
    lines = text.replace("\r\n", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    by_blank_lines = bool(filled) and filled[-1] - filled[0] + 1 > len(filled)
    texts: list[list[str]] = []
    numbers: list[int] = []
    before = -1
    for number in filled:
        if by_blank_lines and number == before + 1 and texts:
            texts[-1].append(lines[number])
        else:
            texts.append([lines[number]])
            numbers.append(number + 1)
        before = number
    good = [index for index, text_lines in enumerate(texts) if not any(map(bad.has_escaped_bytes, text_lines))]
    for index in sorted(set(range(len(texts))) - set(good)):
        bad.add(f"{name}, line {numbers[index]}", "not UTF-8", "")
    places = Places.of(f"{name}, line", (numbers[index] for index in good))
    return Rows({"text": ["\n".join(texts[index]) for index in good]}, name, places=places)


def _parse_parquet(data: bytes, name: str) -> Rows:
    import pyarrow  # type: ignore[import-untyped]
    from pyarrow import parquet

    try:
        # On this thread alone: a thread of Arrow's pools that still holds Python's memory when the interpreter ends
        # aborts the process, and the exit code is lost.
        table = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False).read(use_threads=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{name} is no whole parquet file: {str(error).splitlines()[0]}", "write it again") from error
    return Rows(table.to_pydict(), name, _label_names(table.schema.metadata or {}))


def _label_names(metadata: dict[bytes, bytes]) -> dict[str, list[str]]:
    """The names of class labels that the `datasets` library keeps in a parquet file."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}")).get("info", {}).get("features", {})
        inner = {name: feature.get("feature", feature) for name, feature in features.items()}
        return {name: list(f["names"]) for name, f in inner.items() if f.get("_type") == "ClassLabel"}
    except (ValueError, AttributeError, KeyError, TypeError):
        return {}  # a note of another tool, not for us


_PARSERS: dict[str, Callable[[str, str, BadRows], Rows]] = {
    "csv": parse_csv,
    "tsv": parse_tsv,
    "jsonl": _parse_jsonl,
    "json": _parse_json,
    "txt": _parse_txt,
}
_KINDS = {
    "csv": "csv",
    "tsv": "tsv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "json",
    "parquet": "parquet",
    "txt": "txt",
}
