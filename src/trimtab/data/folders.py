"""The data files of a folder or a pattern: found within a bound, so that a whole disk is not read by mistake."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path

from trimtab.data.files import file_format
from trimtab.errors import DataError

_MAX_ENTRIES = 500_000
_HIDDEN = (".", "_")
_MIN_FILES_OF_LABEL = 5


def files_of_folder(folder: Path) -> list[Path]:
    """Return the data files in a folder and its subfolders, without hidden ones, in order.

    Raises:
        DataError: If the folder contains far more files than data has.
    """
    found: list[Path] = []
    for parent, subfolders, names in _walk(folder):
        subfolders[:] = [name for name in subfolders if not name.startswith(_HIDDEN)]
        files = (Path(parent, name) for name in names if not name.startswith(_HIDDEN) and file_format(Path(name)))
        found += [file for file in files if file.is_file()]
    return sorted(found)


def files_matching(pattern: str) -> Iterator[Path]:
    """Yield the files that match a pattern.

    Raises:
        DataError: If a recursive pattern begins at a folder that contains far more files than data has.
    """
    pattern = os.path.expanduser(pattern)
    if "**" in pattern:
        start = Path(pattern)
        while glob.has_magic(str(start)):
            start = start.parent
        for _ in _walk(start):
            pass
    return (Path(name) for name in glob.iglob(pattern, recursive=True) if Path(name).is_file())


def files_by_label(folder: Path, files: list[Path]) -> dict[str, list[Path]]:
    """Return the files by the name of their subfolder, if these names are labels; else nothing.

    They are if each subfolder contains only texts, and several: IMDb's reviews are in pos/ and neg/.
    """
    by_name: dict[str, list[Path]] = {}
    for file in files:
        *subfolders, _ = file.relative_to(folder).parts
        if len(subfolders) > 1 or file_format(file) != "txt":
            return {}
        if subfolders:
            by_name.setdefault(subfolders[0], []).append(file)
    are_labels = len(by_name) > 1 and min(map(len, by_name.values())) >= _MIN_FILES_OF_LABEL
    return by_name if are_labels else {}


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    num_entries = 0
    for parent, subfolders, names in os.walk(folder):
        num_entries += len(subfolders) + len(names)
        if num_entries > _MAX_ENTRIES:
            raise DataError(
                f"{folder} contains more than {_MAX_ENTRIES:,} files and folders",
                "name the folder or the files with the rows",
            )
        yield parent, subfolders, names
