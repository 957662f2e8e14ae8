"""The folder `checkpoints/` of a run: lists its checkpoints, opens the newest valid one, and removes old ones."""

import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.checkpoint.folder import remove_folder
from trimtab.checkpoint.store import StoredCheckpoint, find_checkpoint_problem, read_manifest
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.units import format_bytes

_STEP = re.compile(r"step-(\d+)")
_Identity = tuple[str, int, int]


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint of a run, as described by its manifest.

    Attributes:
        step: The step after which it was saved.
        path: Its folder.
        num_bytes: Its size on disk.
        facts: The facts that were saved with it; empty if it is not valid.
        problem: Why it is not valid; empty if it is.
    """

    step: int
    path: Path
    num_bytes: int
    facts: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_valid(self) -> bool:
        """Whether a run can resume from it."""
        return not self.problem

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics among its facts."""
        metrics = self.facts.get("metrics")
        return metrics if isinstance(metrics, dict) else {}


class CheckpointsFolder:
    """The checkpoints of a run, in folders named `step-N`.

    Args:
        folder: Their folder; it need not exist yet.
        keep: How many of the newest valid checkpoints `tidy` keeps, at least one.
    """

    def __init__(self, folder: str | os.PathLike[str], *, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = max(1, keep)
        self._damaged: dict[_Identity, str] = {}  # problems found by checksum, which later listings do not compute

    def place(self, step: int) -> Path:
        """Return the folder for the checkpoint of a step."""
        return self.folder / f"step-{step}"

    def checkpoints(self, *, checksums: bool = False) -> list[Checkpoint]:
        """List all checkpoints, oldest first.

        Args:
            checksums: Whether to read every file; otherwise only damage that changed the size of a file is found.
        """
        return [self._inspect(step, path, checksums) for step, path in self._steps()]

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, verified by checksum, or None; newer invalid ones are logged."""
        stored = self.open()
        if stored is None:
            return None
        path = stored.folder
        return Checkpoint(int(path.name.removeprefix("step-")), path, _num_bytes(path), stored.facts)

    def open(self, step: int | None = None) -> StoredCheckpoint | None:
        """Open a checkpoint for loading; every file is verified once.

        Args:
            step: Its step; None opens the newest valid one, and logs newer invalid ones.

        Returns:
            The checkpoint; None if no step was given and none is valid.

        Raises:
            CheckpointError: The checkpoint of the given step does not exist or is not valid.
        """
        steps = self._steps()
        if step is not None:
            path = dict(steps).get(step)
            if path is None:
                existing = ", ".join(path.name for _, path in steps) or "none"
                raise CheckpointError(f"{self.folder} has no checkpoint of step {step}", f"choose one of: {existing}")
            _refuse_renamed(step, path)
            return StoredCheckpoint(path)
        for number, path in reversed(steps):
            try:
                _refuse_renamed(number, path)
                return StoredCheckpoint(path)
            except CheckpointError as error:
                self._damaged[_identity(path)] = error.problem
                say(f"skipping {path.name}: {error.problem}")
        return None

    def tidy(self, best: int | None = None) -> list[int]:
        """Remove all checkpoints except the newest valid ones and the best.

        An invalid checkpoint is removed once a newer valid one exists. Failures to remove are logged.

        Args:
            best: The step of the best checkpoint, which is never removed.

        Returns:
            The steps of the removed checkpoints.
        """
        found = self.checkpoints()
        valid = [checkpoint.step for checkpoint in found if checkpoint.is_valid]
        if not valid:
            return []
        kept = {*valid[-self.keep :], best}
        return self._remove(c for c in found if c.step not in kept and c.step < valid[-1])

    def drop_after(self, step: int) -> list[int]:
        """Remove the checkpoints of later steps, because the run repeats these steps.

        Returns:
            The steps of the removed checkpoints.
        """
        return self._remove(checkpoint for checkpoint in self.checkpoints() if checkpoint.step > step)

    def disk_shortage(self, checkpoint_bytes: int) -> str:
        """Describe why the disk is too small for `keep` checkpoints and one being written; empty if it is not.

        Args:
            checkpoint_bytes: The size of one checkpoint. Existing checkpoints count as free space.
        """
        existing = self.folder.resolve()
        while not existing.exists():
            existing = existing.parent
        held = sum(checkpoint.num_bytes for checkpoint in self.checkpoints())
        needed, free = max(0, (self.keep + 1) * checkpoint_bytes - held), shutil.disk_usage(existing).free
        if needed <= free:
            return ""
        return (
            f"{self.folder} has {format_bytes(free)} free, but {self.keep + 1} checkpoints need "
            f"{format_bytes(needed)}: free space on that disk, or lower checkpoint.keep"
        )

    def _steps(self) -> list[tuple[int, Path]]:
        if not self.folder.is_dir():
            return []
        try:
            matches = [(_STEP.fullmatch(path.name), path) for path in self.folder.iterdir()]
        except OSError as error:
            cure = "make the folder readable for this user"
            raise CheckpointError(f"{self.folder} cannot be read: {error.strerror or error}", cure) from error
        return sorted((int(match[1]), path) for match, path in matches if match is not None and path.is_dir())

    def _inspect(self, step: int, path: Path, checksums: bool) -> Checkpoint:
        num_bytes = _num_bytes(path)
        problem = self._damaged.get(_identity(path), "") or find_checkpoint_problem(path, checksums=checksums)
        if problem:
            if checksums:
                self._damaged[_identity(path)] = problem
            return Checkpoint(step, path, num_bytes, problem=problem)
        try:
            _refuse_renamed(step, path)
            return Checkpoint(step, path, num_bytes, read_manifest(path).facts)
        except CheckpointError as error:
            return Checkpoint(step, path, num_bytes, problem=error.problem)

    def _remove(self, checkpoints: Iterable[Checkpoint]) -> list[int]:
        removed = []
        for checkpoint in checkpoints:
            try:
                remove_folder(checkpoint.path)
                removed.append(checkpoint.step)
            except OSError as error:
                say(f"{checkpoint.path} cannot be removed: {error.strerror or error}")
        return removed


def _refuse_renamed(step: int, path: Path) -> None:
    saved = read_manifest(path).facts.get("step", step)
    if saved != step:
        raise CheckpointError(f"{path} was saved at step {saved}", f"rename it to step-{saved}")


def _identity(path: Path) -> _Identity:
    """Return a value that changes if another folder replaces this one."""
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
        except OSError:  # removed in the meantime
            continue
    return total
