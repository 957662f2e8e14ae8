"""Saves while the training goes on: a snapshot on the training thread, the writing on another.

Where host memory cannot hold a snapshot, the state is written at once instead, piece by piece.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from trimtab.checkpoint.codec import Encoded
from trimtab.checkpoint.snapshot import Snapshots, free_host_bytes
from trimtab.checkpoint.store import EncodedPart, write_checkpoint
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.units import format_bytes, format_seconds

_SHARE_OF_FREE_MEMORY = 0.75  # the rest is for the page cache, through which the files go, and for everybody else


class BackgroundWriter:
    """Writes checkpoints, one at a time. A save that fails does not stop the run: it is told, and the next one tries.

    Attributes:
        failure: Why the last save that ended failed; None if it did not.
        last_seconds: How long the last save took that succeeded, from the snapshot until it was in its place;
            None before the first.
        last_blocked_seconds: For how much of the last call of `save` the training stood still.

    Args:
        on_saved: Called with the folder after each save that succeeded, on the thread that wrote it.
        on_failure: Called with the error of each save that failed, on the thread that wrote it.
        free_memory: How many bytes of host memory are free; None if nobody can tell.
        snapshots: What takes the snapshots.
    """

    def __init__(
        self,
        *,
        on_saved: Callable[[Path], None] | None = None,
        on_failure: Callable[[CheckpointError], None] | None = None,
        free_memory: Callable[[], int | None] = free_host_bytes,
        snapshots: Snapshots | None = None,
    ) -> None:
        self.failure: CheckpointError | None = None
        self.last_seconds: float | None = None
        self.last_blocked_seconds: float | None = None
        self._on_saved, self._on_failure = on_saved, on_failure
        self._free_memory = free_memory
        self._snapshots = snapshots or Snapshots()
        self._thread: threading.Thread | None = None
        self._has_said_waited = self._has_said_foreground = False

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
        """Save `parts` as they are now. A save that is still being written is waited for first.

        Args:
            folder: Where to.
            parts: What `encode_parts` gave; its tensors may change as soon as this returns.
            facts: What `write_checkpoint` takes.

        Returns:
            Why the save before this one failed, or, where this one was written at once, this one. None if all is well.
        """
        began = time.monotonic()
        has_to_wait = self.is_writing
        before = self.wait()
        if has_to_wait:
            self._say_waited(time.monotonic() - began)
        facts, started = deepcopy(dict(facts or {})), time.monotonic()
        snapshot = self._snapshot(parts)
        if snapshot is None:
            self._write(Path(folder), parts, facts, started, _nothing_to_wait_for)
            before = self.failure
        else:
            copied, ready = snapshot
            arguments = (Path(folder), copied, facts, started, ready)
            # no daemon: a program that ends, even by an error, ends after its last save
            self._thread = threading.Thread(target=self._write, args=arguments, name="trimtab-checkpoint")
            self._thread.start()
        self.last_blocked_seconds = time.monotonic() - began
        return before

    def wait(self) -> CheckpointError | None:
        """Wait until nothing is being written.

        Returns:
            Why the last save failed; None if it did not.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        return self.failure

    def close(self) -> CheckpointError | None:
        """Wait, and give the host memory back.

        Returns:
            What `wait` does.
        """
        failure = self.wait()
        self._snapshots.drop()
        return failure

    def _say_waited(self, seconds: float) -> None:
        if not self._has_said_waited:
            say(
                "a save was due while the one before was still being written, and the training waited "
                f"{format_seconds(seconds)} for it, as it will each time: saving less often costs less"
            )
        self._has_said_waited = True

    def _snapshot(self, parts: Mapping[str, Encoded]) -> Any:
        """Copies and what to wait for; None if there is no memory for them."""
        missing, free = self._snapshots.num_bytes_missing(parts), self._free_memory()
        if missing <= 0 or free is None or missing <= free * _SHARE_OF_FREE_MEMORY:
            try:
                return self._snapshots.take(parts)
            except (MemoryError, RuntimeError) as error:  # torch has no error of its own for host memory
                if not _is_about_memory(error):
                    raise
        self._snapshots.drop()
        if not self._has_said_foreground:
            say(
                f"a snapshot needs {format_bytes(missing)} of host memory, which is not free: checkpoints are written "
                "in the foreground, and the training waits for them"
            )
        self._has_said_foreground = True
        return None

    def _write(
        self,
        folder: Path,
        parts: Mapping[str, EncodedPart],
        facts: Mapping[str, Any],
        started: float,
        ready: Callable[[], None],
    ) -> None:
        try:
            ready()
            write_checkpoint(folder, parts, facts)
        except Exception as error:
            self.failure = _as_checkpoint_error(folder, error)
            say(f"a save failed, and the training goes on: {self.failure.problem}. {self.failure.cure}")
            self._tell(self._on_failure, self.failure)
            return
        self.last_seconds = time.monotonic() - started
        self.failure = None
        self._tell(self._on_saved, folder)

    def _tell(self, callback: Callable[[Any], None] | None, value: Any) -> None:
        try:
            if callback is not None:
                callback(value)
        except Exception as error:  # what comes after a save must not undo it
            say(f"after a save: {type(error).__name__} {error}")


def _nothing_to_wait_for() -> None:
    """The state is there already."""


def _as_checkpoint_error(folder: Path, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    wrapped = CheckpointError(f"{folder} could not be written: {type(error).__name__} {error}", "see the log")
    wrapped.__cause__ = error
    return wrapped


def _is_about_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(
        words in str(error).lower() for words in ("allocate memory", "out of memory", "alloc_cpu", "not enough memory")
    )
