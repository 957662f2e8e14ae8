"""Load `Rows` from a source that a recipe names: a file, a folder, a dataset on the Hub, or Python objects."""

import difflib
import glob
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.addresses import path_problem
from trimtab.data import hub
from trimtab.data.bad_rows import BadRows
from trimtab.data.delimited import convert_numbers
from trimtab.data.files import file_format, from_objects, read_file, read_text, require_format
from trimtab.data.folders import files_by_label, files_matching, files_of_folder
from trimtab.data.rows import RowLocations, Rows, concatenate, hold_out_rows
from trimtab.data.streams import StreamNeed, read_stream
from trimtab.errors import DataError
from trimtab.log import say

__all__ = ["Rows", "check_source", "load_rows", "hold_out_rows"]

_SLICE = re.compile(r"(?P<base>.+)\[(?P<start>[^\[\]:]*):(?P<stop>[^\[\]:]*)\]")
_SPLIT = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+){0,2})(:(?P<split>[\w.+-]+))?")
_GIVEN_IN_PYTHON = re.compile(r"<(\w+) given in Python>")  # written to the recipe of such a run
_MANY_FILES = 20  # more are reported before they are read
_SPLIT_WORDS = {"train": "train", "training": "train", "valid": "eval", "validation": "eval", "dev": "eval"}
_SPLIT_WORDS |= {"val": "eval", "eval": "eval", "test": "test", "testing": "test"}


def load_rows(source: Any, *, on_bad_rows: str = "stop", need: StreamNeed | None = None, role: str = "train") -> Rows:
    """Load rows from any source.

    Args:
        source: A file (csv, tsv, jsonl, json, parquet, arrow, txt; also .gz), a folder or a pattern of such files, a
            name on the Hub ("imdb", "imdb:test", "glue/mrpc:train"), each with an optional slice ("reviews.csv[:100]",
            "imdb:train[10%:]"); a list of files; or a `datasets.Dataset`, a mapping of columns, a data frame, an
            iterable of dicts, a list of texts.
        on_bad_rows: "stop" raises at a row that cannot be read; "skip" drops such rows and logs how many.
        need: How much to read of a source without a length, such as a generator or an `IterableDataset`.
        role: "train" or "eval": which of several splits to take if the source names none.

    Raises:
        DataError: If there are no rows, there is no end of them, or a row cannot be read; the message has its location
            and how to fix it.
    """
    bad = BadRows(on_bad_rows)
    if isinstance(source, Rows):
        return source
    if isinstance(source, str | os.PathLike):
        rows = _load_named(os.fspath(source), bad, role)
    elif names_files(source) or _are_files(source):
        found = _locate_files(source)
        rows = _load_files(found.files, found.origin, bad)
    else:
        rows = _convert_objects(source, bad, need, role)
    bad.report(rows.origin)
    if not len(rows):
        detail = f": all {bad.num_skipped} are bad and were skipped" if bad.num_skipped else ""
        raise DataError(f"{rows.origin} has no rows{detail}", "use a source with at least one valid row")
    return rows


def names_files(source: Any) -> bool:
    """Whether a source is a list of paths."""
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(item, os.PathLike) for item in source)


def check_source(source: str | Sequence[Path]) -> None:
    """Check that a source exists, without reading its rows.

    Raises:
        DataError: The source does not exist; the message lists similar names, if there are any.
    """
    found = _locate(source) if isinstance(source, str) else _locate_files(source)
    if found.window is not None:
        _bounds(found.window, 0, found.origin)
    if found.hub_name is not None:
        hub.load_from_hub(found.hub_name, rows=False)
    for path in found.files:
        require_format(path)
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} cannot be read: permission denied", f"chmod u+r {path}")
    _require_one_format(found.files, found.origin)


@dataclass(frozen=True)
class _Location:
    """The location of a named source: in files, in a folder that `datasets` saved, or on the Hub."""

    origin: str
    window: tuple[str, str] | None
    files: Sequence[Path] = ()
    saved: Path | None = None
    hub_name: str | None = None
    split: str | None = None
    by_label: Mapping[str, Sequence[Path]] = field(default_factory=dict)


def is_here(text: str) -> bool:
    """Whether a source is a local file or folder, or a pattern that matches a local file."""
    base = _split_slice(text)[0]
    folder = base.rpartition(":")[0]
    return (
        Path(os.path.expanduser(base)).exists()
        or (glob.has_magic(base) and next(files_matching(base), None) is not None)
        or (bool(folder) and Path(os.path.expanduser(folder)).is_dir())
    )


def make_source_absolute(text: str) -> str:
    """Make the path of a local source absolute; other sources are returned unchanged."""
    base = _split_slice(text)[0]
    return f"{Path(os.path.expanduser(base)).absolute()}{text[len(base) :]}" if is_here(text) else text


def _split_slice(text: str) -> tuple[str, re.Match[str] | None]:
    """Split a source into name and slice: a trailing [a:b], unless a file with the whole text as its name exists."""
    match = None if Path(os.path.expanduser(text)).exists() else _SLICE.fullmatch(text)
    return (text if match is None else match["base"]), match


def _locate(text: str) -> _Location:
    """Find the path or Hub name of a source."""
    if problem := path_problem(text):
        raise DataError(
            f"{text!r} {problem}: rows are read from local files and the Hub", "download the file, and name its path"
        )
    if given := _GIVEN_IN_PYTHON.fullmatch(text):
        raise DataError(
            f"the rows of this run were given in Python, as a {given[1]}",
            "resume it in Python with the same rows: fit(Recipe(…, data={'train': rows}, out='RUN'), resume=True)",
        )
    base, match = _split_slice(text)
    window = None if match is None else (match["start"].strip(), match["stop"].strip())
    path, (folder, _, split) = Path(os.path.expanduser(base)), base.rpartition(":")
    if path.exists():
        return _locate_path(path, None, window)
    if glob.has_magic(base):
        return _Location(base, window, _match_files(base))
    if folder and Path(os.path.expanduser(folder)).is_dir():
        return _locate_path(Path(os.path.expanduser(folder)), split, window)
    on_hub = _SPLIT.fullmatch(base)
    if on_hub is None or file_format(Path(base)) or base.startswith((".", "/", "~")):
        raise DataError(f"{base!r} does not exist", _similar_names(Path(os.path.expanduser(base))))
    return _Location(base, window, hub_name=on_hub["name"], split=on_hub["split"])


def _locate_files(paths: Sequence[str | os.PathLike[str]]) -> _Location:
    """Return the location of rows in a list of files."""
    files = [Path(os.path.expanduser(path)) for path in paths]
    for file in files:
        if problem := path_problem(str(file)):
            raise DataError(f"{str(file)!r} {problem}", "name a file")
        if not file.is_file():
            raise DataError(f"{str(file)!r} is not a file", _similar_names(file))
    return _Location(f"{len(files)} files", None, files)


def _load_named(text: str, bad: BadRows, role: str) -> Rows:
    """Load rows from a path or a Hub name."""
    found = _locate(text)
    if found.hub_name is not None:
        return _load_hub(found.hub_name, found.split, found.window, role)
    if found.by_label:
        return _load_labelled(found, bad)
    if found.saved is not None:
        dataset = hub.pick_split(hub.load_saved(found.saved), found.split, str(found.saved), role)
        rows = hub.rows_of_dataset(dataset, found.origin)
    else:
        rows = _load_files(found.files, found.origin, bad)
    return rows if found.window is None else rows.select(_slice_range(len(rows), found.window, rows.origin))


def _match_files(pattern: str) -> list[Path]:
    found = sorted(files_matching(pattern), key=str)
    if not found:
        raise DataError(f"no file matches {pattern!r}", f"check the pattern; the current directory is {Path.cwd()}")
    return found


def _slice_range(num_rows: int, window: tuple[str, str], origin: str) -> range:
    """Return the row indices of "[start:stop]"."""
    indices = range(num_rows)[slice(*_bounds(window, num_rows, origin))]
    if not indices:
        raise DataError(f"{origin}[{window[0]}:{window[1]}] is empty", f"use a slice within its {num_rows} rows")
    return indices


def _bounds(window: tuple[str, str], num_rows: int, origin: str) -> list[int | None]:
    """Return the bounds of a slice; each is a number, from the end if negative, or a percentage."""
    bounds: list[int | None] = []
    for bound in window:
        if not bound:
            bounds.append(None)
        elif re.fullmatch(r"-?\d+", bound):
            bounds.append(int(bound))
        elif re.fullmatch(r"\d+(\.\d+)?%", bound) and float(bound[:-1]) <= 100:
            # The same rounding for both sides: [:10%] and [10%:] meet without gap or overlap.
            bounds.append(round(num_rows * float(bound[:-1]) / 100))
        else:
            raise DataError(f"{origin}: {bound!r} is not a slice bound", "write [:100], [-50:], [10%:] or [100:200]")
    return bounds


def _locate_path(path: Path, split: str | None, window: tuple[str, str] | None) -> _Location:
    if path.is_file():
        return _Location(str(path), window, [path])
    if hub.is_saved(path):
        return _Location(str(path) if split is None else f"{path}:{split}", window, saved=path, split=split)
    if split is not None:
        raise DataError(f"{path} is a folder of files, without a split {split!r}", f"use a pattern: {path}/{split}*")
    files = files_of_folder(path)
    _require_one_split(path, files)
    return _Location(str(path), window, files, by_label=files_by_label(path, files))


def _require_one_split(folder: Path, files: list[Path]) -> None:
    """Reject folders whose files belong to several splits: training on the test set is never meant."""
    if not files:
        raise DataError(f"{folder} has no data files", "put csv, tsv, jsonl, json, parquet, arrow or txt files there")
    splits: dict[str, Path] = {}
    for file in files:
        for word in re.split(r"[^a-z]+", str(file.relative_to(folder)).lower()):
            if word in _SPLIT_WORDS:
                splits.setdefault(_SPLIT_WORDS[word], file)
    if len(splits) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in splits.values())
        example = splits.get("train", next(iter(splits.values())))
        raise DataError(
            f"{folder} has files of several splits: {names}", f"choose those of one split, for example {example}"
        )


def _require_one_format(paths: Sequence[Path], origin: str) -> set[str | None]:
    by_format = {file_format(path): path for path in paths}
    if len(by_format) > 1:
        names = ", ".join(sorted(path.name for path in by_format.values()))
        raise DataError(f"{origin} has files of several formats: {names}", "choose files of one format: folder/*.csv")
    return set(by_format)


def _load_files(paths: Sequence[Path], origin: str, bad: BadRows) -> Rows:
    formats = _require_one_format(paths, origin)
    if len(paths) > _MANY_FILES:
        say(f"{origin}: reading {len(paths):,} files, from {paths[0]} to {paths[-1]}")
    rows = concatenate([read_file(path, bad) for path in paths], origin)
    if formats == {"txt"} and len(rows):
        say(f"{origin}: {len(rows)} texts (separated by blank lines, or one per line in files without blank lines)")
    # On the whole column of all files: a shard with only numbers must get the same type as the others.
    return convert_numbers(rows) if formats <= {"csv", "tsv"} else rows


def _load_labelled(location: _Location, bad: BadRows) -> Rows:
    """Load one text from each file, with the name of its folder as the label."""
    origin, window, by_label = location.origin, location.window, location.by_label
    num_others = len(location.files) - sum(map(len, by_label.values()))
    others = f"; {num_others} other file(s) are not read" if num_others else ""
    say(f"{origin}: one text per file, with the names of folders as labels: {', '.join(by_label)}{others}")
    texts = [(read_text(file, bad), label, file) for label, files in by_label.items() for file in files]
    rows = [(text, label, file) for text, label, file in texts if text is not None]
    locations = RowLocations(
        tuple(f"{file}, text" for *_, file in rows), array("i", range(len(rows))), array("q", [1] * len(rows))
    )
    columns: dict[str, list[Any]] = {"text": [row[0] for row in rows], "label": [row[1] for row in rows]}
    labelled = Rows(columns, origin, locations=locations)
    return labelled if window is None else labelled.select(_slice_range(len(labelled), window, origin))


def held_out_split(source: Any) -> Any:
    """Return the split for evaluation of a dictionary of datasets, or of a folder that contains one; else None."""
    folder = Path(os.path.expanduser(source)) if isinstance(source, str) else None
    is_folder = folder is not None and hub.is_saved(folder)
    if not is_folder and not (hub.is_dataset(source) and hasattr(source, "keys")):
        return None
    splits = source if folder is None else hub.load_saved(folder)
    name = hub.usual_split(splits, "eval") if hasattr(splits, "keys") and "train" in splits else None
    if name is None:
        return None
    say(f"data.eval is not set: using the split {name!r} of {source if is_folder else 'the datasets given'}")
    return f"{source}:{name}" if is_folder else splits[name]


def _load_hub(name: str, split: str | None, window: tuple[str, str] | None, role: str) -> Rows:
    dataset = hub.pick_split(hub.load_from_hub(name), split, name, role)
    origin = f"{name}:{dataset.split}"
    if window is None:
        return hub.rows_of_dataset(dataset, origin)
    indices = _slice_range(len(dataset), window, origin)
    rows = hub.rows_of_dataset(dataset.select(indices), origin)
    return Rows(rows.columns, origin, rows.label_names, RowLocations.of(f"{origin}, row", (i + 1 for i in indices)))


def _similar_names(path: Path) -> str:
    if not path.parent.is_dir():
        return f"check the path: the folder {path.parent} does not exist; the current directory is {Path.cwd()}"
    names: dict[str, list[str]] = {}  # by stem: equal suffixes would make all names similar
    for file in sorted(path.parent.iterdir()):
        names.setdefault(file.stem.lower(), []).append(file.name)
    stems = difflib.get_close_matches(path.stem.lower(), names, n=3, cutoff=0.75)
    near = [name for stem in stems for name in names[stem]][:3]
    hint = f"did you mean {' or '.join(near)}?" if near else "check the path;"
    return f"{hint} relative paths start in {path.parent.resolve()}"


def _are_files(source: Any) -> bool:
    """Whether every string in a list is an existing data file."""
    if not isinstance(source, list | tuple) or not source:
        return False
    if all(isinstance(item, str) and len(item) < 1024 and file_format(Path(item)) for item in source):
        found = all(Path(item).is_file() for item in source)
        if found:
            say(f"reading the {len(source)} files that the list of strings names")
        return found
    return False


def _convert_objects(source: Any, bad: BadRows, need: StreamNeed | None, role: str) -> Rows:
    """Convert Python objects to rows."""
    if hub.is_dataset(source):
        dataset = hub.pick_split(source, None, "the dataset given", role)
        if hasattr(dataset, "select"):
            return hub.rows_of_dataset(dataset, "the dataset given")
        rows = from_objects(read_stream(dataset, need, "the rows of the dataset given"), "the dataset given", bad, "")
        return Rows(rows.columns, rows.origin, hub.label_names(dataset.features), rows.locations)
    if hasattr(source, "to_dict") and hasattr(source, "notna"):  # a pandas data frame, in which NaN means missing
        frame = source.astype(object).where(source.notna(), None)
        return Rows({str(name): frame[name].tolist() for name in frame.columns}, "the data frame given")
    if isinstance(source, Mapping):
        return Rows({str(name): list(values) for name, values in source.items()}, "the columns given")
    items = source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "__iter__"):
        items = (source[index] for index in range(len(source)))
    if not isinstance(items, Iterable):
        raise DataError(
            f"cannot load rows from a {type(source).__name__}",
            "use a file, a folder, a Hub name, a datasets.Dataset, or an iterable of dicts",
        )
    if not hasattr(source, "__len__"):
        items = read_stream(items, need, "the rows given")
    items = [dict(item) if isinstance(item, Mapping) else item for item in items]
    if items and all(isinstance(item, str) for item in items):
        return Rows({"text": items}, "the texts given")
    return from_objects(items, "the rows given", bad, 'use dicts such as {"text": ..., "label": ...}')
