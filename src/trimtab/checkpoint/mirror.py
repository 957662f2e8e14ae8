"""Keeps a second copy of a run's checkpoints and of its best model, such as on a drive that outlives the machine.

A mirror never stops a run: what fails is said once, and made up for when the place is there again.
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

from trimtab.checkpoint.checkpoints_folder import Shelf
from trimtab.checkpoint.disk_errors import refused_path
from trimtab.checkpoint.folder import clear_leftovers, remove_folder, sync_path, whole_folder
from trimtab.checkpoint.store import why_invalid
from trimtab.errors import CheckpointError
from trimtab.log import say, say_once
from trimtab.units import format_bytes

_INDEX = ".mirror.json"  # in both places: the run's says which mirror is its own, the mirror's what it holds
_NUM_TRIES = 3
_Looks = dict[str, list[int]]  # size and time of change of each file


class Mirror:
    """The second copy of a run's folder. `sync` may be called at any time, and does what is left to do.

    Args:
        source: The run's folder.
        target: The mirror of this run, and of no other.
        checkpoints: The name of the folder in which the run's checkpoints are.
        folders: Names of other folders to copy, each of which is replaced as a whole when it has changed.
        files: Names of files to copy.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        target: str | os.PathLike[str],
        *,
        checkpoints: str = "checkpoints",
        folders: Sequence[str] = ("best",),
        files: Sequence[str] = (),
    ) -> None:
        self.source, self.target = Path(source), Path(target)
        self.problem = ""
        self._checkpoints = checkpoints
        self._folders, self._files = tuple(folders), tuple(files)
        self._index: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._wanted = False
        self._thread: threading.Thread | None = None

    def sync(self) -> str:
        """Bring the mirror up to date, now and here: files, other folders, then checkpoints, the newest first.

        Returns:
            Why it could not be done; empty if it is up to date. The run need not care: the next call tries again.
        """
        try:
            self._open()
            self._prune(newest_may_go=False)
            steps = sorted(self._steps_here(), reverse=True)
            # A state counts on numbers and a best model of its time or later: whoever is killed here has copied these.
            for name in self._files:
                self._copy_file(name)
            for name in self._folders:
                self._copy_folder(name)
            for step in steps:
                self._copy_folder(f"{self._checkpoints}/step-{step}", is_checkpoint=True)
            self._prune(newest_may_go=True)
            problem = ""
        except CheckpointError as error:
            problem = f"{error.problem}; {error.cure}"
        except OSError as error:
            place = refused_path(error)
            problem = f"{error.strerror or error}" + (f" ({place})" if place else "")
        if problem and not self.problem:
            say(f"the mirror {self.target} is not up to date: {problem}. The run goes on; each save tries again")
        elif self.problem and not problem:
            say(f"the mirror {self.target} is up to date again")
        self.problem = problem
        return problem

    def sync_soon(self) -> None:
        """Bring the mirror up to date on a thread of its own, so that a slow drive holds up nobody."""
        with self._lock:
            self._wanted = True
            if self._thread is None or not self._thread.is_alive():
                # a daemon, because a drive that hangs must not keep the process from ending; a kill does no harm
                self._thread = threading.Thread(target=self._serve, name="trimtab-mirror", daemon=True)
                self._thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for what `sync_soon` began.

        Returns:
            Whether the mirror is up to date; False also if the time is over.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._lock:  # in which a thread is started, and takes its leave
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
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
            try:
                self.sync()
            except Exception as error:  # a fault of ours; it is told, and the run goes on
                self.problem = f"{type(error).__name__} {error}"
                say_once(f"the mirror {self.target} failed: {self.problem}")

    # ------------------------------------------------------------------ whose mirror this is

    def _open(self) -> None:
        """See that the place is there and is the mirror of this run.

        A drive that is not mounted leaves an empty folder on another disk, which must not be filled, and two runs in
        one mirror would remove each other's checkpoints. So both places hold the name of the pair.
        """
        here, there = _read_index(self.source), _read_index(self.target)
        pair_id = here.get("id")
        if pair_id and not there.get("id") and here.get("target") == str(self.target.absolute()):
            raise CheckpointError(
                f"what was there is gone; {self.target} may be on a drive that is not mounted",
                f"mount it, or delete {self.source / _INDEX} to begin anew",
            )
        if there.get("id") and there["id"] != pair_id:
            raise CheckpointError(f"{self.target} is the mirror of another run", "choose another folder")
        self._index = {"folders": {}, "files": {}, **there}
        if not there.get("id"):
            self.target.mkdir(parents=True, exist_ok=True)
            if any(not path.name.startswith(".") for path in self.target.iterdir()):
                raise CheckpointError(f"{self.target} holds other files", "choose an empty folder for the mirror")
            self._index["id"] = pair_id or uuid.uuid4().hex
            _write_index(self.target, self._index)
        pair = {"id": self._index["id"], "target": str(self.target.absolute())}
        if here != pair:
            _write_index(self.source, pair)
        (self.target / self._checkpoints).mkdir(exist_ok=True)
        for folder in (self.target, self.target / self._checkpoints):
            clear_leftovers(folder)

    # ------------------------------------------------------------------ copies

    def _steps_here(self) -> set[int]:
        return {c.step for c in Shelf(self.source / self._checkpoints).checkpoints() if c.is_valid}

    def _prune(self, newest_may_go: bool) -> None:
        """Remove checkpoints that the run has removed; a run without any, perhaps by accident, takes none with it."""
        here = self._steps_here()
        there = Shelf(self.target / self._checkpoints).checkpoints()
        newest = max((c.step for c in there if c.is_valid), default=None)
        for checkpoint in there if here else []:
            if checkpoint.step not in here and (newest_may_go or checkpoint.step != newest):
                remove_folder(checkpoint.path)
                self._index["folders"].pop(f"{self._checkpoints}/{checkpoint.path.name}", None)

    def _copy_folder(self, name: str, is_checkpoint: bool = False) -> None:
        source, target = self.source / name, self.target / name
        _refuse_links([target, target.parent], deep=False)
        for _ in range(_NUM_TRIES):
            try:
                looks = _looks(source)
                is_known = self._index["folders"].get(name) == looks
                if is_known and target.is_dir() and _sizes(_looks(target)) == _sizes(looks):
                    return
                _refuse_if_full(self.target, looks)
                copy_whole(source, target, is_checkpoint=is_checkpoint)
                self._note("folders", name, looks)
                return
            except _ChangedMeanwhile:
                continue
            except _Damaged as error:
                say_once(f"{source} is not mirrored: {error.problem}")
                return
            except FileNotFoundError:
                if not self.target.exists():
                    raise
                if not source.exists():
                    return  # there is none, or the run has just removed it
        raise CheckpointError(f"{source} changes faster than it can be copied", "save less often")

    def _copy_file(self, name: str) -> None:
        source, target = self.source / name, self.target / name
        if not source.is_file():
            return
        stat = source.stat()
        looks = [stat.st_size, stat.st_mtime_ns]
        if self._index["files"].get(name) == looks and target.is_file() and target.stat().st_size == stat.st_size:
            return
        copy_file(source, target)
        self._note("files", name, looks)

    def _note(self, kind: str, name: str, looks: Any) -> None:
        self._index[kind][name] = looks
        _write_index(self.target, self._index)


def restore(
    mirror: str | os.PathLike[str], folder: str | os.PathLike[str], *, checkpoints: str = "checkpoints"
) -> None:
    """Make a run's folder from its mirror, on a machine that has lost it or never had it.

    Checkpoints that are damaged, or hold a link, are named and left out. What is in `folder` under the same names is
    replaced.

    Args:
        mirror: What `Mirror` had as its target.
        folder: The run's folder.
        checkpoints: The name of the folder with the checkpoints.

    Raises:
        CheckpointError: It is no mirror, or holds no valid checkpoint, or a link.
    """
    source, target = Path(mirror), Path(folder)
    index = _read_index(source)
    if not index.get("id"):
        raise CheckpointError(f"{source} is no mirror of a run", "pass the folder that checkpoint.mirror named")
    others = [path for path in sorted(source.iterdir()) if path.name not in (_INDEX, checkpoints)]
    others = [path for path in others if path.is_file() or not path.name.startswith(".")]
    _refuse_links([source / checkpoints], deep=False)
    _refuse_links(others)
    nothing = CheckpointError(f"{source} holds no valid checkpoint", "start the run anew")
    found = Shelf(source / checkpoints).checkpoints()
    if not any(checkpoint.is_valid for checkpoint in found):
        raise nothing
    target.mkdir(parents=True, exist_ok=True)
    num_copied = 0
    for checkpoint in found:
        try:
            copy_whole(checkpoint.path, target / checkpoints / checkpoint.path.name, is_checkpoint=True)
            num_copied += 1
        except _Damaged as error:
            say(f"{checkpoint.path} is left out: {error.problem}")
    if not num_copied:
        raise nothing
    for path in others:
        copy_file(path, target / path.name) if path.is_file() else copy_whole(path, target / path.name)
    _write_index(target, {"id": index["id"], "target": str(source.absolute())})


def mirror_of(folder: str | os.PathLike[str]) -> Path | None:
    """Where the mirror of a run's folder is, if it has one."""
    target = _read_index(Path(folder)).get("target")
    return Path(target) if isinstance(target, str) else None


def is_mirror(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder is the second copy of a run, and not a run itself."""
    index = _read_index(Path(folder))
    return bool(index.get("id")) and "folders" in index


class _ChangedMeanwhile(Exception):
    """A folder was replaced while it was read, so that the copy may be a mixture."""


class _Damaged(CheckpointError):
    """A checkpoint that is not worth a copy."""


def copy_whole(source: Path, target: Path, *, is_checkpoint: bool = False) -> None:
    """Copy a folder so that it appears whole in its new place or not at all.

    Args:
        source: The folder.
        target: Its new place; what is there is replaced.
        is_checkpoint: Verify the copy as a checkpoint before it takes its place.
    """
    if is_checkpoint and (link := _first_link(source)):
        # a copy would hold the file itself, wherever that came from, and be valid where its original is not
        raise _Damaged(f"{link} is a link, perhaps to the outside of the folder", "copy the file itself there")
    looks = _looks(source)
    with whole_folder(target, marker=None, what="copy") as place:
        for name, (_, changed_ns) in looks.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, place / name)
            os.utime(place / name, ns=(changed_ns, changed_ns))
        if _looks(source) != looks:
            raise _ChangedMeanwhile
        problem = why_invalid(place) if is_checkpoint else ""
        if problem:
            raise _Damaged(problem.replace(str(place), str(source)), "take an older checkpoint")


def copy_file(source: Path, target: Path) -> None:
    """Copy a file so that it appears whole in its new place or not at all."""
    beside = target.with_name(f".{target.name}.mirrored")
    beside.unlink(missing_ok=True)  # a link there would be written through
    try:
        shutil.copyfile(source, beside)
        sync_path(beside)
        beside.replace(target)
    except OSError:
        with suppress(OSError):
            beside.unlink()
        raise


def _first_link(path: Path) -> Path | None:
    """A symbolic link at a path, or below it; None if there is none. Hard links are the files themselves."""
    inner = [path, *(sorted(path.rglob("*")) if path.is_dir() else [])]
    return next((one for one in inner if one.is_symlink()), None)


def _refuse_links(paths: Sequence[Path], *, deep: bool = True) -> None:
    """Raise if a link would be followed to what may lie outside of a mirror."""
    for path in paths:
        link = _first_link(path) if deep else path if path.is_symlink() else None
        if link is not None:
            raise CheckpointError(
                f"{link} is a link, perhaps to the outside of the mirror", "put the file or folder itself there"
            )


def _looks(folder: Path) -> _Looks:
    """What changes when a file does, of every file in a folder; fails where there is no folder."""
    if not folder.is_dir():
        raise FileNotFoundError(2, "No such folder", str(folder))
    looks = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            stat = path.stat()
            looks[str(path.relative_to(folder))] = [stat.st_size, stat.st_mtime_ns]
    return looks


def _sizes(looks: _Looks) -> dict[str, int]:
    return {name: size for name, (size, _) in looks.items()}


def _refuse_if_full(place: Path, looks: _Looks) -> None:
    """Before anything is copied: a drive that is full would else be filled to the brim again at every save."""
    needed, free = sum(_sizes(looks).values()), shutil.disk_usage(place).free
    if needed > free:
        raise CheckpointError(
            f"{format_bytes(needed)} are needed there and {format_bytes(free)} free", "make room on that drive"
        )


def _read_index(folder: Path) -> dict[str, Any]:
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return index if isinstance(index, dict) else {}


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    beside = folder / f"{_INDEX}.writing"
    beside.unlink(missing_ok=True)  # a link there would be written through
    beside.write_text(json.dumps(index))
    sync_path(beside)
    beside.replace(folder / _INDEX)
