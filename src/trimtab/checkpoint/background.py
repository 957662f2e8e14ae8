"""Asynchronous saves: a snapshot is taken on the training thread and written to disk on another.

If host memory cannot hold a snapshot, the state is written synchronously instead, in pieces.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.snapshot import CopiedPart, Snapshots, free_host_bytes
from trimtab.checkpoint.store import write_checkpoint
from trimtab.errors import CheckpointError
from trimtab.hardware.memory import is_out_of_memory
from trimtab.log import say
from trimtab.units import format_bytes, format_seconds

# share of free memory; the rest is left to the page cache, through which files are written, and to others
_SHARE_OF_FREE_MEMORY = 0.75
_WORTH_REPORTING_S = 1.0  # a shorter wait for the previous save costs nothing that other settings would save


class BackgroundWriter:
    """Writes checkpoints, one at a time. A failed save is logged and does not stop the run; the next save tries again.

    Attributes:
        failure: Why the last completed save failed; None if it succeeded.
        last_seconds: Duration of the last successful save, from the snapshot until the folder was in place; None before
            the first.

    Args:
        on_saved: Called with the folder after each successful save, on the thread that wrote it.
        free_memory: Returns the free host memory in bytes, or None if it is unknown.
    """

    def __init__(
        self,
        *,
        on_saved: Callable[[Path], None] | None = None,
        free_memory: Callable[[], int | None] = free_host_bytes,
    ) -> None:
        self.failure: CheckpointError | None = None
        self.last_seconds: float | None = None
        self._on_saved = on_saved
        self._free_memory = free_memory
        self._snapshots = Snapshots()
        self._thread: threading.Thread | None = None
        self._has_reported_wait = self._has_reported_foreground = False

    @property
    def is_writing(self) -> bool:
        """Whether a save is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def save(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Encoded],
        facts: Mapping[str, Any] | None = None,
    ) -> CheckpointError | None:
        """Save the current values of `parts`, after waiting for a save that is still being written.

        Args:
            folder: The checkpoint's folder.
            parts: The result of `encode_parts`; its tensors may change as soon as this returns.
            facts: As for `write_checkpoint`.

        Returns:
            Why the previous save failed, or this one if it was written synchronously; None without a failure.
        """
        began = time.monotonic()
        has_to_wait = self.is_writing
        failure = self.wait()
        if has_to_wait:
            self._report_wait(time.monotonic() - began)
        facts, started = deepcopy(dict(facts or {})), time.monotonic()
        snapshot = self._snapshot(parts)
        if snapshot is None:
            self._write(Path(folder), parts, facts, started)
            return self.failure
        copied, wait_for_copies = snapshot
        # not a daemon thread: the interpreter waits for the last save, even if the program ends by an exception
        self._thread = threading.Thread(
            target=self._write, args=(Path(folder), copied, facts, started, wait_for_copies), name="trimtab-checkpoint"
        )
        self._thread.start()
        return failure

    def wait(self) -> CheckpointError | None:
        """Wait until no save is being written.

        Returns:
            Why the last save failed; None if it succeeded.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.failure

    def close(self) -> CheckpointError | None:
        """Wait, and free the host memory.

        Returns:
            Why the last save failed; None if it succeeded.
        """
        failure = self.wait()
        self._snapshots.drop()
        return failure

    def _report_wait(self, seconds: float) -> None:
        if seconds < _WORTH_REPORTING_S:
            return
        if not self._has_reported_wait:
            say(
                f"training waited {format_seconds(seconds)} for the previous checkpoint to be written: "
                "increase checkpoint.every to save less often"
            )
        self._has_reported_wait = True

    def _snapshot(self, parts: Mapping[str, Encoded]) -> tuple[dict[str, CopiedPart], Callable[[], None]] | None:
        """Take a snapshot; None if there is not enough host memory."""
        missing, free = self._snapshots.num_bytes_missing(parts), self._free_memory()
        if missing <= 0 or free is None or missing <= free * _SHARE_OF_FREE_MEMORY:
            try:
                return self._snapshots.take(parts)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
        self._snapshots.drop()
        if not self._has_reported_foreground:
            say(
                f"too little host memory for a snapshot ({format_bytes(missing)} needed): checkpoints are written "
                "synchronously, while training waits"
            )
        self._has_reported_foreground = True
        return None

    def _write(
        self,
        folder: Path,
        parts: Mapping[str, Encoded | CopiedPart],
        facts: Mapping[str, Any],
        started: float,
        wait_for_copies: Callable[[], None] | None = None,
    ) -> None:
        try:
            if wait_for_copies is not None:
                wait_for_copies()
            write_checkpoint(folder, parts, facts)
        except Exception as error:
            self.failure = _as_checkpoint_error(folder, error)
            say(f"saving a checkpoint failed, training continues: {self.failure.problem}. {self.failure.cure}")
            return
        self.last_seconds = time.monotonic() - started
        self.failure = None
        try:
            if self._on_saved is not None:
                self._on_saved(folder)
        except Exception as error:  # the checkpoint is written, whatever the callback does
            say(f"after saving a checkpoint: {type(error).__name__} {error}")


def _as_checkpoint_error(folder: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    wrapped = CheckpointError(f"{folder} could not be written: {type(error).__name__} {error}", "see the log")
    wrapped.__cause__ = error
    return wrapped
