"""The folder `checkpoints/` of a run: what is there, which one to go on from, which ones to remove."""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import clear_leftovers, remove_folder
from trimtab.checkpoint.store import StoredCheckpoint, read_manifest, why_invalid
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.units import format_bytes

_STEP = re.compile(r"step-(\d+)")
_Identity = tuple[str, int, int]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run, as far as its manifest tells.

    Attributes:
        step: The step after which it was saved.
        path: Its folder.
        num_bytes: What it takes on the disk.
        facts: What was said of it when it was saved.
        problem: Why it is not valid; empty if it is.
    """

    step: int
    path: Path
    num_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether a run can go on from it."""
        return not self.problem

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics among its facts."""
        metrics = self.facts.get("metrics")
        return metrics if isinstance(metrics, dict) else {}


@dataclass(frozen=True)
class DiskRoom:
    """Whether a disk has room for the checkpoints of a run.

    Attributes:
        folder: Where they go.
        num_checkpoints: How many are there at once, the one that is being written among them.
        free_bytes: What is free.
        needed_bytes: What those take that are still to come.
    """

    folder: Path
    num_checkpoints: int
    free_bytes: int
    needed_bytes: int

    @property
    def is_enough(self) -> bool:
        """Whether all of them fit."""
        return self.needed_bytes <= self.free_bytes

    @property
    def shortage(self) -> str:
        """What to tell the user before the run; empty if there is enough."""
        if self.is_enough:
            return ""
        return (
            f"{self.folder} has {format_bytes(self.free_bytes)} free, and {self.num_checkpoints} checkpoints need "
            f"{format_bytes(self.needed_bytes)}: make room, or set checkpoint.keep lower"
        )


def disk_room(folder: str | os.PathLike[str], checkpoint_bytes: int, keep: int, held_bytes: int = 0) -> DiskRoom:
    """Look whether there is room for `keep` checkpoints and the one that is being written.

    Args:
        folder: Where they go; it need not exist yet.
        checkpoint_bytes: The size of one.
        keep: How many are kept.
        held_bytes: What checkpoints that are there take now; they count as room.
    """
    place = Path(folder).resolve()
    while not place.exists():
        place = place.parent
    needed = max(0, (keep + 1) * checkpoint_bytes - held_bytes)
    return DiskRoom(Path(folder), keep + 1, shutil.disk_usage(place).free, needed)


class Shelf:
    """The checkpoints of a run, in folders named after their steps.

    Args:
        folder: Where they are; it need not exist yet.
        keep: How many of the newest valid ones `tidy` leaves, at least one.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)
        self._damaged: dict[_Identity, str] = {}  # what was found by checksum, which is not computed every time

    def place(self, step: int) -> Path:
        """Where the checkpoint of a step belongs."""
        return self.folder / f"step-{step}"

    def checkpoints(self, *, checksums: bool = False) -> list[Checkpoint]:
        """All of them, the oldest first.

        Args:
            checksums: Whether to read every file; else damage shows only where it changed a size.
        """
        return [self._look(step, path, checksums) for step, path in self._steps()]

    def newest(self, *, checksums: bool = True) -> Checkpoint | None:
        """The newest valid one; newer ones that are not valid are named. None if there is none."""
        for step, path in reversed(self._steps()):
            found = self._look(step, path, checksums)
            if found.is_valid:
                return found
            say(f"{path.name} is passed over: {found.problem}")
        return None

    def open(self, step: int | None = None) -> StoredCheckpoint | None:
        """Open a checkpoint to load from it; every file is verified once.

        Args:
            step: Which one; None takes the newest valid one, and names newer ones that are not.

        Returns:
            The checkpoint, or None if none is valid and no step was asked for.

        Raises:
            CheckpointError: The one that was asked for is not there or not valid.
        """
        steps = self._steps()
        if step is not None:
            path = dict(steps).get(step)
            if path is None:
                there = ", ".join(path.name for _, path in steps) or "none"
                raise CheckpointError(f"{self.folder} has no checkpoint of step {step}", f"there are: {there}")
            self._refuse_renamed(step, path)
            return StoredCheckpoint(path)
        for number, path in reversed(steps):
            try:
                self._refuse_renamed(number, path)
                return StoredCheckpoint(path)
            except CheckpointError as error:
                self._damaged[_identity(path)] = error.problem
                say(f"{path.name} is passed over: {error.problem}")
        return None

    def tidy(self, best: int | None = None) -> list[int]:
        """Remove what is not kept: the newest valid ones and the best stay, of the others none.

        A checkpoint that is not valid goes as soon as a newer valid one is there. What cannot be removed is named.

        Args:
            best: The step of the best one, which is never removed.

        Returns:
            The steps that were removed.
        """
        found = self.checkpoints()
        valid = [checkpoint.step for checkpoint in found if checkpoint.is_valid]
        if not valid:
            return []
        kept = {*valid[-self.keep :], best}
        return self._remove(c for c in found if c.step not in kept and c.step < valid[-1])

    def drop_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps, because the run goes another way from `step` on.

        Returns:
            The steps that were removed.
        """
        return self._remove(checkpoint for checkpoint in self.checkpoints() if checkpoint.step > step)

    def clear_leftovers(self) -> list[Path]:
        """Remove what killed writers left; to be called when the run's folder is held.

        Returns:
            What was removed.
        """
        return clear_leftovers(self.folder)

    def room_for(self, checkpoint_bytes: int) -> DiskRoom:
        """Whether the disk has room for all checkpoints that are kept, and the one that is being written."""
        held = sum(checkpoint.num_bytes for checkpoint in self.checkpoints())
        return disk_room(self.folder, checkpoint_bytes, self.keep, held)

    def _steps(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        try:
            matches = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        except OSError as error:
            cure = "make the folder readable for this user"
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror or error}", cure) from error
        return sorted((int(match[1]), path) for match, path in matches if match is not None and path.is_dir())

    def _look(self, step: int, path: Path, checksums: bool) -> Checkpoint:
        num_bytes = _num_bytes(path)
        problem = self._damaged.get(_identity(path), "") or why_invalid(path, checksums=checksums)
        if problem:
            if checksums:
                self._damaged[_identity(path)] = problem
            return Checkpoint(step, path, num_bytes, problem=problem)
        try:
            self._refuse_renamed(step, path)
            return Checkpoint(step, path, num_bytes, read_manifest(path).facts)
        except CheckpointError as error:
            return replace(Checkpoint(step, path, num_bytes), problem=error.problem)

    def _refuse_renamed(self, step: int, path: Path) -> None:
        saved = read_manifest(path).facts.get("step", step)
        if saved != step:
            raise CheckpointError(f"{path} was saved at step {saved}", f"give it its name again: step-{saved}")

    def _remove(self, checkpoints: Iterable[Checkpoint]) -> list[int]:
        removed = []
        for checkpoint in checkpoints:
            try:
                remove_folder(checkpoint.path)
                removed.append(checkpoint.step)
            except OSError as error:
                say(f"{checkpoint.path} cannot be removed: {error.strerror or error}")
        return removed


def _identity(path: Path) -> _Identity:
    """Tells a folder from one that took its place."""
    try:
        stat = path.stat()
    except OSError:
        return path.name, 0, 0
    return path.name, stat.st_ino, stat.st_mtime_ns


def _num_bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size
        except OSError:  # gone in between
            continue
    return total
