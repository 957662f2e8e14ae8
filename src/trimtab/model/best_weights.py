"""Compare the best model of a run with the checksums in the run's `run.json`, before its weights are used.

A file is read once: the checksum is cached with the file's size and times, in the cache folder and in this process.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from trimtab.checksums import checksum_of
from trimtab.data.cache_folder import cache_folder
from trimtab.errors import ModelError, as_argument

_known: dict[str, str] = {}  # checksums of this process, by path, size and times


def check_best_weights(folder: Path) -> None:
    """Refuse the best model of a run if its weights are not those that the run wrote.

    Any other folder passes, and so does a model that the run replaces meanwhile, whose checksums it has not written.

    Raises:
        ModelError: A file of weights is damaged or missing.
    """
    if folder.name != "best" and not folder.name.startswith(".best.outdated-"):
        return
    run = folder.parent
    status = _read_json(run / "run.json")
    noted = status.get("best_files")
    files = noted.get("files") if isinstance(noted, dict) else None
    if not isinstance(noted, dict) or not isinstance(files, dict) or not _is_of_step(folder, noted):
        return
    problem = next((problem for name, checksum in files.items() if (problem := _problem(folder / name, checksum))), "")
    if not problem or noted != _read_json(run / "run.json").get("best_files") or not _is_of_step(folder, noted):
        return
    raise ModelError(
        f"{problem} ({run / 'run.json'})",
        f"write it again from its checkpoint: trimtab resume {as_argument(run)}; or restore {folder} from a copy. If "
        f"you changed it on purpose, use it from another folder: cp -r {as_argument(folder)} DIR",
    )


def _is_of_step(folder: Path, noted: dict[str, Any]) -> bool:
    """Whether checksums are those of the model in a folder, which may have lost its own facts."""
    return _read_json(folder / "trimtab.json").get("step") in (None, noted.get("step"))


def _problem(path: Path, expected: Any) -> str:
    try:
        found = cached_checksum(path)
    except FileNotFoundError:
        return f"{path} is missing, which the run wrote"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return "" if found == expected else f"{path} is damaged: its checksum is {found}, and the run wrote {expected}"


def cached_checksum(path: Path) -> str:
    """Return the checksum of a file, which is read only if its size or its times have changed."""
    stat = path.stat()
    stamp = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
    if stamp in _known:
        return _known[stamp]
    folder = cache_folder()
    name = hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    stored = None if folder is None else folder / "checksums" / f"{name}.json"
    found = {} if stored is None else _read_json(stored)
    if found.get("stamp") != stamp:
        found = {"stamp": stamp, "checksum": checksum_of(path)}
        if stored is not None:
            with contextlib.suppress(OSError):  # without a cache, the next command reads the file again
                _write_json(stored, found)
    _known[stamp] = str(found.get("checksum"))
    return _known[stamp]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_json(path: Path, content: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    os.replace(temporary, path)
