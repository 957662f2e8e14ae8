"""The checkpoints of a run: saved in the background, rotated, and mirrored."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.background import BackgroundWriter
from trimtab.checkpoint.checkpoints_folder import Checkpoint, CheckpointsFolder
from trimtab.checkpoint.mirror import Mirror
from trimtab.checkpoint.store import read_manifest
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError
from trimtab.log import say

_MIRROR_WAIT_S = 600.0
_SLOW_DISK = 200e6  # bytes per second


class Checkpoints:
    """Save the training state, and find the newest checkpoint.

    Args:
        engine: Holds the state.
        shelf: The folder of the checkpoints; only the main process writes to it.
        mirror: A second location for everything that is kept, or None.
        on_saved: Called after each save, on the thread that wrote it.
        facts: Returns what else to store with each checkpoint: the settings and facts of the run.
    """

    saves = True

    def __init__(
        self,
        engine: Engine,
        shelf: CheckpointsFolder,
        mirror: Mirror | None = None,
        on_saved: Callable[[int], None] = lambda step: None,
        facts: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        self._engine = engine
        self.shelf = shelf
        self._mirror = mirror
        self._on_saved = on_saved
        self._facts_of_run = facts
        self._writer = BackgroundWriter(on_saved=self._saved)
        self._num_bytes = 0

    def save(
        self,
        step: int,
        metrics: dict[str, float],
        best_step: int | None,
        *,
        wait: bool = False,
        problem: CheckpointError | None = None,
    ) -> None:
        """Save the state after `step`. All processes call it, the main process writes.

        Args:
            step: Optimizer steps done.
            metrics: Metrics of the last evaluation.
            best_step: The step of the best model, whose checkpoint is never removed.
            wait: Whether to return only after the checkpoint is on the disk.
            problem: Why the best model is not on the disk. If given, the state is not saved either: a run resumed from
                it would never write that model.
        """
        state = self._engine.capture_state()
        if state is None:
            return
        if problem is not None:
            self._writer.wait()
            self._writer.failure = problem
            say(f"step {step} is not saved, because the best model could not be written: {problem.problem}")
            return
        with self._engine.busy("saving a checkpoint"):
            self._writer.save(self.shelf.place(step), state, self._facts(step, metrics) | {"best_step": best_step})
            if wait:
                self._writer.wait()

    def _facts(self, step: int, metrics: dict[str, float]) -> dict[str, Any]:
        return {
            "step": step,
            "metrics": metrics,
            "time": time.time(),
            **_numerics(self._engine),
            **self._facts_of_run(),
        }

    def _saved(self, folder: Path) -> None:
        self.shelf.tidy(read_manifest(folder).facts.get("best_step"))
        self._on_saved(int(folder.name.removeprefix("step-")))
        if self._mirror is not None:
            self._mirror.sync_in_background()

    def newest(self) -> Checkpoint | None:
        """Return the newest valid checkpoint, including those of earlier sessions; None if there is none.

        Waits for a save in progress. All processes call it, and get the same result.
        """
        return self._engine.decide_on_main_process(self._newest)

    def _newest(self) -> Checkpoint | None:
        self._writer.wait()
        return self.shelf.newest()

    @property
    def seconds_needed(self) -> float:
        """How long before a deadline a save should start; before the first save, estimated for a slow disk."""
        measured = self._writer.last_seconds
        return 2.0 * (self._num_bytes / _SLOW_DISK if measured is None else measured)

    def warn_if_disk_is_small(self, num_bytes: int) -> None:
        """Warn before the run if the disk has no space for checkpoints of `num_bytes` each."""
        self._num_bytes = num_bytes
        if self._engine.is_main_process:
            shortage = self.shelf.disk_shortage(num_bytes)
            if shortage:
                say(f"checkpoints will fail: {shortage}")

    def close(self) -> CheckpointError | None:
        """Wait for saves and copies in progress.

        Returns:
            Why the last save failed, or None.
        """
        failure = self._writer.close()
        if self._mirror is not None and self._engine.is_main_process:
            self._mirror.sync_in_background()  # for files written since the last checkpoint, such as the best model
            self._mirror.wait(_MIRROR_WAIT_S)
        return failure


class NoCheckpoints:
    """Save nothing: the run cannot be resumed."""

    saves = False
    seconds_needed = 0.0

    def save(
        self,
        step: int,
        metrics: dict[str, float],
        best_step: int | None,
        *,
        wait: bool = False,
        problem: CheckpointError | None = None,
    ) -> None:
        """Do nothing."""

    def newest(self) -> Checkpoint | None:
        """Return None."""
        return None

    def warn_if_disk_is_small(self, num_bytes: int) -> None:
        """Do nothing."""

    def close(self) -> CheckpointError | None:
        """Return None."""
        return None


def _numerics(engine: Engine) -> dict[str, Any]:
    """Return the settings that determine the last bits of a sum."""
    return {
        "num_processes": engine.num_processes,
        "num_threads": torch.get_num_threads(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": engine.device.type,
        "torch": str(torch.__version__),
    }


def numeric_differences(facts: dict[str, Any], engine: Engine) -> list[str]:
    """Describe how this machine differs from a checkpoint's; differences change the last bits of a resumed run."""
    words = {"num_threads": "threads", "cpu": "CPU capability", "num_processes": "processes"}
    return [
        f"{words.get(name, name)} {facts[name]} then, {value} now"
        for name, value in _numerics(engine).items()
        if name in facts and facts[name] != value
    ]
