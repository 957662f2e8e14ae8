"""From what the user names (a file, a folder, a hub name, Python objects) to `Rows`: the first step of the data."""

import difflib
import glob
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.data import hub
from trimtab.data.bad_rows import BadRows
from trimtab.data.delimited import with_numbers
from trimtab.data.files import check_kind, from_objects, kind_of, read_file
from trimtab.data.rows import Places, Rows, joined, split_off
from trimtab.errors import DataError
from trimtab.log import say

__all__ = ["Rows", "check_source", "load_rows", "split_off"]

_SLICE = re.compile(r"(?P<base>.+)\[(?P<start>[^\[\]:]*):(?P<stop>[^\[\]:]*)\]")
_SPLIT = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+){0,2})(:(?P<split>[\w.+-]+))?")
_IN_PYTHON = "the rows given"
_SPLIT_WORDS = {"train": "train", "training": "train", "valid": "eval", "validation": "eval", "dev": "eval"}
_SPLIT_WORDS |= {"val": "eval", "eval": "eval", "test": "test", "testing": "test"}


def load_rows(source: Any, *, on_bad_rows: str = "stop") -> Rows:
    """Load rows from whatever names or holds them.

    Args:
        source: A file (csv, tsv, jsonl, json, parquet, txt; also .gz), a folder or a pattern of such files, a name on
            the hub ("imdb", "imdb:test", "glue/mrpc:train"), each with a slice if wanted ("reviews.csv[:100]",
            "imdb:train[10%:]"); or a `datasets.Dataset`, a mapping of columns, a data frame, an iterable of dicts,
            a list of texts.
        on_bad_rows: "stop" makes a row that cannot be read an error; "skip" leaves such rows out, and says how many.

    Raises:
        DataError: If there are no rows, or some that cannot be read; the message names the place and the cure.
    """
    bad = BadRows(on_bad_rows)
    if isinstance(source, Rows):
        return source
    if isinstance(source, str | os.PathLike):
        rows = _named(os.fspath(source), bad)
    elif _are_files(source):
        rows = _from_files([Path(path) for path in source], f"{len(source)} files", bad)
    else:
        rows = _from_objects(source, bad)
    bad.report(rows.origin)
    if not len(rows):
        detail = f": all {bad.num_skipped} were bad and skipped" if bad.num_skipped else ""
        raise DataError(f"{rows.origin} has no rows{detail}", "give a source with at least one good row")
    return rows


def check_source(text: str) -> None:
    """See that what a user names is there, without reading its rows.

    Raises:
        DataError: With names that are near, where there are such.
    """
    found = _locate(text)
    if found.window is not None:
        _bounds(found.window, 0, found.origin)
    if found.hub_name is not None:
        hub.find_on_hub(found.hub_name)
    for path in found.files:
        check_kind(path)
        if not os.access(path, os.R_OK):
            raise DataError(f"{path} cannot be read: permission denied", f"chmod u+r {path}")
    _one_kind(found.files, found.origin)


@dataclass(frozen=True)
class _Location:
    """Where the rows are that a text names: in files, in a folder that `datasets` saved, or on the hub."""

    origin: str
    window: tuple[str, str] | None
    files: Sequence[Path] = ()
    saved: Path | None = None
    hub_name: str | None = None
    split: str | None = None


def is_here(text: str) -> bool:
    """Whether a source is a file or a folder of this machine, or a pattern that some file matches."""
    base = _without_slice(text)[0]
    folder = base.rpartition(":")[0]
    return (
        Path(base).expanduser().exists()
        or (glob.has_magic(base) and any(glob.iglob(os.path.expanduser(base), recursive=True)))
        or (bool(folder) and Path(folder).expanduser().is_dir())
    )


def absolute_source(text: str) -> str:
    """A source of this machine with an absolute path, which means the same from any directory; others as they are."""
    base = _without_slice(text)[0]
    return f"{Path(base).expanduser().absolute()}{text[len(base) :]}" if is_here(text) else text


def _without_slice(text: str) -> tuple[str, re.Match[str] | None]:
    """What a source names, and its slice: a last [a:b], unless something exists under the whole text."""
    match = None if Path(text).expanduser().exists() else _SLICE.fullmatch(text)
    return (text if match is None else match["base"]), match


def _locate(text: str) -> _Location:
    """Find a path or a hub name; a last [a:b] is a slice, unless something exists under the whole text."""
    base, match = _without_slice(text)
    window = None if match is None else (match["start"].strip(), match["stop"].strip())
    path, (folder, _, split) = Path(base).expanduser(), base.rpartition(":")
    if path.exists():
        return _locate_path(path, None, window)
    if glob.has_magic(base):
        return _Location(base, window, _matching(base))
    if folder and Path(folder).expanduser().is_dir():
        return _locate_path(Path(folder).expanduser(), split, window)
    on_hub = _SPLIT.fullmatch(base)
    if on_hub is None or kind_of(Path(base)) or base.startswith((".", "/", "~")):
        raise DataError(f"{base!r} does not exist", _near_names(Path(base).expanduser()))
    return _Location(base, window, hub_name=on_hub["name"], split=on_hub["split"])


def _named(text: str, bad: BadRows) -> Rows:
    """Rows from a path or a hub name."""
    found = _locate(text)
    if found.hub_name is not None:
        return _from_hub(found.hub_name, found.split, found.window)
    if found.saved is not None:
        dataset = hub.pick_split(hub.load_saved(found.saved), found.split, str(found.saved))
        rows = hub.rows_of_dataset(dataset, found.origin)
    else:
        rows = _from_files(found.files, found.origin, bad)
    return rows if found.window is None else rows.select(_slice_range(len(rows), found.window, rows.origin))


def _matching(pattern: str) -> list[Path]:
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    found = [Path(name) for name in names if Path(name).is_file()]
    if not found:
        raise DataError(f"no file matches {pattern!r}", f"check the pattern; it was looked for from {Path.cwd()}")
    return found


def _slice_range(num_rows: int, window: tuple[str, str], origin: str) -> range:
    """The row numbers of "[start:stop]"."""
    indices = range(num_rows)[slice(*_bounds(window, num_rows, origin))]
    if not indices:
        raise DataError(f"{origin}[{window[0]}:{window[1]}] is empty", f"there are {num_rows} rows")
    return indices


def _bounds(window: tuple[str, str], num_rows: int, origin: str) -> list[int | None]:
    """The bounds of a slice; each is a number, counted from the end where negative, or a percentage."""
    bounds: list[int | None] = []
    for bound in window:
        if not bound:
            bounds.append(None)
        elif re.fullmatch(r"-?\d+", bound):
            bounds.append(int(bound))
        elif re.fullmatch(r"\d+(\.\d+)?%", bound) and float(bound[:-1]) <= 100:
            # One rounding for both sides, so that [:10%] and [10%:] meet without gap or overlap.
            bounds.append(round(num_rows * float(bound[:-1]) / 100))
        else:
            raise DataError(f"{origin}: {bound!r} is no bound of a slice", "write [:100], [-50:], [10%:] or [100:200]")
    return bounds


def _locate_path(path: Path, split: str | None, window: tuple[str, str] | None) -> _Location:
    if path.is_file():
        return _Location(str(path), window, [path])
    if hub.is_saved(path):
        return _Location(str(path) if split is None else f"{path}:{split}", window, saved=path, split=split)
    if split is not None:
        raise DataError(f"{path} is a folder of files, which has no split {split!r}", f"name files: {path}/{split}*")
    found = [
        file for file in sorted(path.rglob("*")) if file.is_file() and kind_of(file) and not _is_hidden(file, path)
    ]
    _refuse_mixture(path, found)
    return _Location(str(path), window, found)


def _is_hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _refuse_mixture(folder: Path, files: list[Path]) -> None:
    """A folder is read whole only where that can be meant: not train and test together."""
    if not files:
        raise DataError(f"{folder} holds no data files", "put csv, tsv, jsonl, json, parquet or txt files there")
    splits: dict[str, Path] = {}
    for file in files:
        for word in re.split(r"[^a-z]+", str(file.relative_to(folder)).lower()):
            if word in _SPLIT_WORDS:
                splits.setdefault(_SPLIT_WORDS[word], file)
    if len(splits) > 1:
        names = ", ".join(str(file.relative_to(folder)) for file in splits.values())
        example = next(iter(splits.values()))
        raise DataError(f"{folder} holds more than one split: {names}", f"name the files of one, for example {example}")


def _one_kind(paths: Sequence[Path], origin: str) -> set[str | None]:
    kinds = {kind_of(path) for path in paths}
    if len(kinds) > 1:
        words = ", ".join(sorted(f"{path.name}" for path in {kind_of(path): path for path in paths}.values()))
        raise DataError(f"{origin} holds files of several kinds: {words}", "name files of one kind: folder/*.csv")
    return kinds


def _from_files(paths: Sequence[Path], origin: str, bad: BadRows) -> Rows:
    kinds = _one_kind(paths, origin)
    rows = joined([read_file(path, bad) for path in paths], origin)
    if kinds == {"txt"} and len(rows):
        say(f"{origin}: {len(rows)} texts (blank lines separate them; in a file without any, each line is a text)")
    # By the whole column of all files, so that a shard that happens to hold numbers alone is typed like the others.
    return with_numbers(rows) if kinds <= {"csv", "tsv"} else rows


def _from_hub(name: str, split: str | None, window: tuple[str, str] | None) -> Rows:
    dataset = hub.pick_split(hub.load_from_hub(name), split, name)
    origin = f"{name}:{dataset.split}"
    if window is None:
        return hub.rows_of_dataset(dataset, origin)
    indices = _slice_range(len(dataset), window, origin)
    rows = hub.rows_of_dataset(dataset.select(indices), origin)
    return Rows(rows.columns, origin, rows.label_names, Places.of(f"{origin}, row", (i + 1 for i in indices)))


def _near_names(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}; it was looked for from {Path.cwd()}"
    names = [file.name for file in path.parent.iterdir()]
    near = difflib.get_close_matches(path.name, names, n=3)
    told = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{told}It was looked for in {path.parent.resolve()}"


def _are_files(source: Any) -> bool:
    """Whether a list names files: paths always do, texts where every one of them is a file that can be read."""
    if not isinstance(source, list | tuple) or not source:
        return False
    if all(isinstance(item, os.PathLike) for item in source):
        return True
    if all(isinstance(item, str) and len(item) < 1024 and kind_of(Path(item)) for item in source):
        found = all(Path(item).is_file() for item in source)
        if found:
            say(f"the {len(source)} texts given are names of files, which are read")
        return found
    return False


def _from_objects(source: Any, bad: BadRows) -> Rows:
    """Rows from Python objects."""
    if hub.is_dataset(source):
        dataset = hub.pick_split(source, None, "the dataset given")
        if hasattr(dataset, "select"):
            return hub.rows_of_dataset(dataset, "the dataset given")
        rows = from_objects(dataset, "the dataset given", bad, "")
        return Rows(rows.columns, rows.origin, hub.label_names(dataset.features), rows.places)
    if hasattr(source, "to_dict") and hasattr(source, "notna"):  # a pandas frame, whose nan means missing
        frame = source.astype(object).where(source.notna(), None)
        return Rows({str(name): frame[name].tolist() for name in frame.columns}, "the data frame given")
    if isinstance(source, Mapping):
        return Rows({str(name): list(values) for name, values in source.items()}, "the columns given")
    items = source
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not hasattr(source, "__iter__"):
        items = (source[index] for index in range(len(source)))
    if not isinstance(items, Iterable):
        raise DataError(
            f"rows cannot be made of a {type(source).__name__}",
            "give a file, a folder, a hub name, a datasets.Dataset, or an iterable of dicts",
        )
    items = [dict(item) if isinstance(item, Mapping) else item for item in items]
    if items and all(isinstance(item, str) for item in items):
        return Rows({"text": items}, "the texts given")
    return from_objects(items, _IN_PYTHON, bad, 'give dicts such as {"text": ..., "label": ...}')
