"""A second copy of a run's checkpoints, best model and small files, for example on a drive that outlives the machine.

A mirror never stops a run: a failure is logged once, and the next sync copies what is missing.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.disk_errors import failed_path
from trimtab.checkpoint.folder import atomic_folder, clear_leftovers, remove_folder, sync_path
from trimtab.checkpoint.store import find_checkpoint_problem
from trimtab.errors import CheckpointError
from trimtab.log import log_info_once, say
from trimtab.units import format_bytes

_INDEX = ".mirror.json"  # the run's copy identifies its mirror, the mirror's copy lists what it contains
_CHECKPOINTS = "checkpoints"
_BEST = "best"
_NUM_TRIES = 3
_Stamp = list[int]  # size and modification time of a file, as stored in JSON
_Stamps = dict[str, _Stamp]  # of every file in a folder


class Mirror:
    """The second copy of a run's folder. `sync` can be called at any time and copies what has changed.

    Args:
        source: The run's folder.
        target: The mirror of this run only.
        files: Names of files to copy, in addition to the checkpoints and the best model.
    """

    def __init__(
        self, source: str | os.PathLike[str], target: str | os.PathLike[str], *, files: Sequence[str] = ()
    ) -> None:
        self.source, self.target = Path(source), Path(target)
        self.problem = ""
        self._files = tuple(files)
        self._index: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._is_requested = False
        self._thread: threading.Thread | None = None

    def sync(self) -> str:
        """Update the mirror synchronously: files, the best model, then checkpoints, newest first.

        Returns:
            Why it failed; empty if the mirror is up to date. The caller need not react: the next call tries again.
        """
        try:
            self._open()
            self._prune(newest_may_go=False)
            steps = sorted(self._steps_here(), reverse=True)
            # A checkpoint needs metrics and a best model that are at least as new: if the process is killed here, these
            # are already in the mirror.
            for name in self._files:
                self._copy_file(name)
            self._copy_folder(_BEST)
            for step in steps:
                self._copy_folder(f"{_CHECKPOINTS}/step-{step}", is_checkpoint=True)
            self._prune(newest_may_go=True)
            problem = ""
        except CheckpointError as error:
            problem = f"{error.problem}; {error.cure}"
        except OSError as error:
            path = failed_path(error)
            problem = f"{error.strerror or error}" + (f" ({path})" if path else "")
        if problem and not self.problem:
            say(f"the mirror {self.target} is not up to date: {problem}. The run continues; each save tries again")
        elif self.problem and not problem:
            say(f"the mirror {self.target} is up to date again")
        self.problem = problem
        return problem

    def sync_in_background(self) -> None:
        """Update the mirror on another thread, so that a slow drive does not delay the caller."""
        with self._lock:
            self._is_requested = True
            if self._thread is None or not self._thread.is_alive():
                # a daemon: a drive that hangs must not keep the process from ending, and a kill does no harm
                self._thread = threading.Thread(target=self._serve, name="trimtab-mirror", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the updates that `sync_in_background` started.

        Returns:
            Whether the mirror is up to date; False also after a timeout.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:  # the lock under which the thread starts and announces its end
                thread = self._thread
                has_died = thread is not None and not thread.is_alive()
            if thread is None or has_died:
                return not has_died and not self.problem
            thread.join(None if end is None else max(0.0, end - time.monotonic()))
            if end is not None and time.monotonic() >= end and thread.is_alive():
                return False

    def _serve(self) -> None:
        while True:
            with self._lock:
                if not self._is_requested:
                    self._thread = None
                    return
                self._is_requested = False
            try:
                self.sync()
            except Exception as error:  # a bug in trimtab, which must not stop the run
                self.problem = f"{type(error).__name__} {error}"
                log_info_once(f"the mirror {self.target} failed: {self.problem}")

    def _open(self) -> None:
        """Check that the target exists and is the mirror of this run, or create it.

        A drive that is not mounted leaves an empty folder on another disk, which must not be filled, and two runs with
        one mirror would remove each other's checkpoints. Both folders therefore contain the id of the pair; if one has
        lost it, the id of the run in both copies of `run.json` counts.
        """
        here, there = _read_index(self.source), _read_index(self.target)
        pair_id, run_id = here.get("id"), _run_id(self.source)
        is_known = run_id is not None and run_id == _run_id(self.target)
        if not is_known and pair_id and not there.get("id") and here.get("target") == str(self.target.absolute()):
            raise CheckpointError(
                f"its content is missing; {self.target} may be on a drive that is not mounted",
                f"mount the drive, or delete {self.source / _INDEX} to start a new mirror",
            )
        if not is_known and there.get("id") and there["id"] != pair_id:
            raise CheckpointError(f"{self.target} is the mirror of another run", "choose another checkpoint.mirror")
        self._index = {"folders": {}, "files": {}, **there}
        if not there.get("id"):
            self.target.mkdir(parents=True, exist_ok=True)
            if not is_known and any(not path.name.startswith(".") for path in self.target.iterdir()):
                raise CheckpointError(f"{self.target} contains other files", "choose an empty folder for the mirror")
            self._index["id"] = pair_id or uuid.uuid4().hex
            _write_index(self.target, self._index)
        pair = {"id": self._index["id"], "target": str(self.target.absolute())}
        if here != pair:
            _write_index(self.source, pair)
        (self.target / _CHECKPOINTS).mkdir(exist_ok=True)
        for folder in (self.target, self.target / _CHECKPOINTS):
            clear_leftovers(folder)

    def _steps_here(self) -> set[int]:
        return {c.step for c in CheckpointsFolder(self.source / _CHECKPOINTS).checkpoints() if c.is_valid}

    def _prune(self, newest_may_go: bool) -> None:
        """Remove checkpoints that the run has removed, but none if the run has lost all, perhaps by accident.

        The newest one stays until the mirror has another one that the run still has: a run that saves faster than the
        drive can copy may have removed all checkpoints that were waiting to be copied.
        """
        here = self._steps_here()
        there = CheckpointsFolder(self.target / _CHECKPOINTS).checkpoints()
        valid = {c.step for c in there if c.is_valid}
        newest = max(valid, default=None)
        newest_may_go = newest_may_go and bool(valid & here)
        for checkpoint in there if here else []:
            if checkpoint.step not in here and (newest_may_go or checkpoint.step != newest):
                remove_folder(checkpoint.path)
                self._index["folders"].pop(f"{_CHECKPOINTS}/{checkpoint.path.name}", None)

    def _copy_folder(self, name: str, is_checkpoint: bool = False) -> None:
        source, target = self.source / name, self.target / name
        _refuse_links([target, target.parent], deep=False)
        for _ in range(_NUM_TRIES):
            try:
                stamps = _stamps_in(source)
                is_known = self._index["folders"].get(name) == stamps
                if is_known and target.is_dir() and _sizes(_stamps_in(target)) == _sizes(stamps):
                    return
                _refuse_if_full(self.target, stamps)
                copy_folder_atomically(source, target, is_checkpoint=is_checkpoint)
                self._record("folders", name, stamps)
                return
            except _Changed:
                continue
            except _Damaged as error:
                log_info_once(f"{source} is not mirrored: {error.problem}")
                return
            except FileNotFoundError:
                if not self.target.exists():
                    raise
                if not source.exists():
                    return  # it does not exist yet, or the run has just removed it
        raise CheckpointError(f"{source} changes faster than it can be copied", "increase checkpoint.every")

    def _copy_file(self, name: str) -> None:
        source, target = self.source / name, self.target / name
        if not source.is_file():
            return
        stamp = _stamp_of(source)
        if self._index["files"].get(name) == stamp and target.is_file() and target.stat().st_size == stamp[0]:
            return
        copy_file_atomically(source, target)
        self._record("files", name, stamp)

    def _record(self, kind: str, name: str, stamps: _Stamp | _Stamps) -> None:
        self._index[kind][name] = stamps
        _write_index(self.target, self._index)


def restore(mirror: str | os.PathLike[str], folder: str | os.PathLike[str]) -> None:
    """Recreate a run's folder from its mirror, on a machine that has lost it or never had it.

    Checkpoints that are damaged or contain a symbolic link are logged and not copied. Content of `folder` with the same
    names is replaced.

    Args:
        mirror: The target of `Mirror`.
        folder: The run's folder.

    Raises:
        CheckpointError: It is not a mirror, or contains no valid checkpoint, or a symbolic link.
    """
    source, target = Path(mirror), Path(folder)
    index = _read_index(source)
    if not index.get("id"):
        raise CheckpointError(f"{source} is not the mirror of a run", "pass the folder that checkpoint.mirror names")
    others = [path for path in sorted(source.iterdir()) if path.name not in (_INDEX, _CHECKPOINTS)]
    others = [path for path in others if path.is_file() or not path.name.startswith(".")]
    _refuse_links([source / _CHECKPOINTS], deep=False)
    _refuse_links(others)
    nothing = CheckpointError(f"{source} contains no valid checkpoint", "start the run again from its recipe")
    found = CheckpointsFolder(source / _CHECKPOINTS).checkpoints()
    if not any(checkpoint.is_valid for checkpoint in found):
        raise nothing
    target.mkdir(parents=True, exist_ok=True)
    num_copied = 0
    for checkpoint in found:
        try:
            copy_folder_atomically(checkpoint.path, target / _CHECKPOINTS / checkpoint.path.name, is_checkpoint=True)
            num_copied += 1
        except _Damaged as error:
            say(f"{checkpoint.path} is not restored: {error.problem}")
    if not num_copied:
        raise nothing
    for path in others:
        copy = copy_file_atomically if path.is_file() else copy_folder_atomically
        copy(path, target / path.name)
    _write_index(target, {"id": index["id"], "target": str(source.absolute())})


def place_of_mirror(folder: Path, root: str) -> Path:
    """Return the folder of a run's mirror below `checkpoint.mirror`: EXPERIMENT/NAME, since several runs share a drive.

    A run that was restored to another place keeps the mirror that it came from.
    """
    known = _read_index(folder).get("target")
    if isinstance(known, str) and Path(root).absolute() in Path(known).parents:
        return Path(known)
    return Path(root, *folder.absolute().parts[-2:])


def has_mirror(folder: Path, root: str) -> bool:
    """Whether the mirror of a run exists below `checkpoint.mirror`, and not only its place."""
    there = place_of_mirror(folder, root)
    known = _read_index(folder).get("id")
    return known is not None and is_mirror(there) and _read_index(there)["id"] == known


def is_mirror(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is the mirror of a run, and not a run itself."""
    index = _read_index(Path(folder))
    return bool(index.get("id")) and "folders" in index


class _Changed(Exception):
    """A folder was replaced while it was read, so the copy may be a mixture."""


class _Damaged(CheckpointError):
    """A checkpoint is not valid and must not be copied."""


def copy_folder_atomically(source: Path, target: Path, *, is_checkpoint: bool = False) -> None:
    """Copy a folder atomically, and replace an existing one.

    Args:
        source: The folder.
        target: The path of the copy.
        is_checkpoint: Verify the copy as a checkpoint before it replaces `target`.
    """
    if is_checkpoint and (link := _first_link(source)):
        # the copy would contain the linked file, wherever it came from, and be valid although the original is not
        raise _Damaged(
            f"{link} is a symbolic link, which may point outside the folder", "replace the link with the file"
        )
    stamps = _stamps_in(source)
    with atomic_folder(target, marker=None, what="copy") as place:
        for name, (_, modified_ns) in stamps.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, place / name)
            os.utime(place / name, ns=(modified_ns, modified_ns))
        if _stamps_in(source) != stamps:
            raise _Changed
        problem = find_checkpoint_problem(place) if is_checkpoint else ""
        if problem:
            raise _Damaged(problem.replace(str(place), str(source)), "load an older checkpoint")


def copy_file_atomically(source: Path, target: Path) -> None:
    """Copy a file atomically."""
    temporary = target.with_name(f".{target.name}.mirrored")
    temporary.unlink(missing_ok=True)  # writing would follow a symbolic link
    try:
        shutil.copyfile(source, temporary)
        sync_path(temporary)
        temporary.replace(target)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def _first_link(path: Path) -> Path | None:
    """Return a symbolic link at or below a path; None without one. Hard links are ordinary files."""
    inner = [path, *(sorted(path.rglob("*")) if path.is_dir() else [])]
    return next((one for one in inner if one.is_symlink()), None)


def _refuse_links(paths: Sequence[Path], *, deep: bool = True) -> None:
    """Raise if a path, or with `deep` anything below it, is a symbolic link."""
    for path in paths:
        link = _first_link(path) if deep else path if path.is_symlink() else None
        if link is not None:
            raise CheckpointError(
                f"{link} is a symbolic link, which may point outside the mirror",
                "replace the link with the file or folder",
            )


def _stamp_of(path: Path) -> _Stamp:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns]


def _stamps_in(folder: Path) -> _Stamps:
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such folder", str(folder))
    return {str(path.relative_to(folder)): _stamp_of(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _sizes(stamps: _Stamps) -> dict[str, int]:
    return {name: size for name, (size, _) in stamps.items()}


def _refuse_if_full(target: Path, stamps: _Stamps) -> None:
    """Raise before anything is copied: otherwise every save would fill a full drive to the last byte again."""
    needed, free = sum(_sizes(stamps).values()), shutil.disk_usage(target).free
    if needed > free:
        raise CheckpointError(
            f"it needs {format_bytes(needed)} and has {format_bytes(free)} free", "free space on that drive"
        )


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _run_id(folder: Path) -> str | None:
    """Return the id in the `run.json` of a run, or of its mirror; None if there is none."""
    try:
        status = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    run_id = status.get("id") if isinstance(status, dict) else None
    return run_id if isinstance(run_id, str) else None


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    temporary = folder / f"{_INDEX}.writing"
    temporary.unlink(missing_ok=True)  # writing would follow a symbolic link
    temporary.write_text(json.dumps(index))
    sync_path(temporary)
    temporary.replace(folder / _INDEX)
