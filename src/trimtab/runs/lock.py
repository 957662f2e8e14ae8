"""The lock of a run folder: a file that names the process that uses the folder. The lock of a dead process is void."""

import fcntl
import json
import os
import time
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.process_identity import Process, this_process
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.units import format_seconds

LOCK = "run.lock"
_HALF_WRITTEN_S = 2.0  # a lock without valid content for this long was left by a process that died while writing it
_CLAIM_S = 60.0  # replacing a stale lock takes milliseconds, so an older claim belongs to a killed process
_WATCHED_S = 150.0  # more than two heartbeats: a clock that was set makes the heartbeat of a running process look old
_held: set[str] = set()  # tokens of the locks that this process holds


@dataclass(frozen=True)
class LockHolder:
    """The process named by a lock file.

    Attributes:
        process: The process.
        token: Unique id of the lock.
        silent_s: Seconds since the last heartbeat, from the file's mtime and this machine's clock; wrong if one of the
            clocks was set in between.
    """

    process: Process
    token: str
    silent_s: float

    @property
    def state(self) -> str:
        """`running`, `dead`, or `elsewhere`: on another host, where its state cannot be checked."""
        if not self.process.is_here:
            return "elsewhere"
        if self.process == this_process() and self.token not in _held:
            return "dead"  # left by an earlier run of this process, as in a notebook
        return "running" if self.process.is_running() else "dead"


def lock_holder(folder: str | os.PathLike[str]) -> LockHolder | None:
    """Return the holder of a folder, dead or alive; None if there is none."""
    found = _read(Path(folder) / LOCK)
    return found[1] if found is not None else None


class RunLock:
    """Hold the lock of a run folder, as a context manager or with `acquire` and `release`.

    Args:
        folder: The run folder, which must exist.
        take_over: Whether to replace a lock of another host, whose process the caller knows to be dead.
        patience_s: Seconds without a heartbeat after which a lock of another host is replaced, if no heartbeat comes
            while this process watches either; None means never.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, take_over: bool = False, patience_s: float | None = None
    ) -> None:
        self.path = Path(folder) / LOCK
        self._take_over = take_over
        self._patience_s = patience_s
        self._token = ""

    def __enter__(self) -> "RunLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: Another process holds it, or the file cannot be created.
        """
        token, deadline = uuid.uuid4().hex, time.monotonic() + _HALF_WRITTEN_S
        try:
            with _folder_flock(self.path.parent):
                while not (self._create(token) or self._replace_stale(token, deadline)):
                    pass
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be created: {error.strerror or error}",
                cure_for_os_error(error, "choose another --out"),
            ) from error
        self._token = token
        _held.add(token)
        if not self.is_held():
            _held.discard(token)
            raise CheckpointError(f"{self.path} was just locked by another process", "run the command again")

    def is_held(self) -> bool:
        """Whether the lock file on the disk is still this one."""
        holder = lock_holder(self.path.parent)
        return holder is not None and holder.token == self._token

    def beat(self) -> None:
        """Touch the file: a heartbeat for other hosts."""
        with suppress(OSError):
            os.utime(self.path)

    def release(self) -> None:
        """Remove the lock file, unless it was replaced or belongs to the parent of a forked process."""
        try:
            holder = lock_holder(self.path.parent)
            if holder is not None and holder.token == self._token and holder.process == this_process():
                self.path.unlink(missing_ok=True)
        except OSError as error:  # no reason to fail: on this host the lock is void once the process has exited
            say(
                f"{self.path} cannot be removed: {error.strerror or error}; this machine ignores it once this "
                "process has exited; delete it before you use the folder on another machine"
            )
        _held.discard(self._token)
        self._token = ""

    def _create(self, token: str) -> bool:
        """Create the lock file; False if it exists."""
        try:
            _write_new(self.path, token)
        except FileExistsError:
            return False
        return True

    def _replace_stale(self, token: str, deadline: float) -> bool:
        """Replace the lock of a dead process; raise if its holder is alive.

        Two processes can find the same lock stale, and the slower one must not replace the lock of the faster one.
        So a process first creates a claim file named after the stale content, and then checks the content again.

        Args:
            token: Id of the new lock.
            deadline: Until then, a lock without valid content may be one that is being written.

        Returns:
            Whether the lock was replaced. If not, try again: the folder may be free or taken by now.
        """
        found = _read(self.path)
        if found is None:
            return False
        raw, holder = found
        if holder is None and time.monotonic() < deadline:
            time.sleep(0.05)
            return False
        if holder is not None:
            self._check_stale(holder)
        claim = self.path.with_name(f".{LOCK}.{zlib.crc32(raw):08x}")
        try:
            _write_new(claim, token)
        except FileExistsError:
            self._wait_for(claim)
            return False
        current = _read(self.path)
        if current is None or current[0] != raw:
            claim.unlink(missing_ok=True)
            return False
        try:
            claim.replace(self.path)
        except OSError:  # others would wait for an abandoned claim
            claim.unlink(missing_ok=True)
            raise
        return True

    def _wait_for(self, claim: Path) -> None:
        """Wait a moment for another process to replace the lock; remove a claim whose process was killed."""
        with suppress(FileNotFoundError):
            if abs(time.time() - claim.stat().st_mtime) > _CLAIM_S:  # in the future: the clock was set back
                claim.unlink()
        time.sleep(0.01)

    def _check_stale(self, holder: LockHolder) -> None:
        """Raise `CheckpointError` unless the lock of `holder` may be replaced."""
        process, state = holder.process, holder.state
        if state == "running":
            raise CheckpointError(
                f"{self.path.parent} is in use by process {process.pid} on this machine",
                f"wait until it is done, or stop it (kill {process.pid}), or choose another --out",
            )
        if state == "elsewhere" and not (self._take_over or self._is_silent(holder)):
            raise CheckpointError(
                f"{self.path.parent} is in use by process {process.pid} on {process.host}, whose last heartbeat is "
                f"{format_seconds(max(0.0, holder.silent_s))} old",
                f"check that it has ended (machine switched off, job cancelled), then delete {self.path}",
            )

    def _is_silent(self, holder: LockHolder) -> bool:
        """Whether the last heartbeat of another host is old, or in the future, and none comes for a while."""
        if self._patience_s is None or abs(holder.silent_s) <= self._patience_s:
            return False
        say(
            f"{self.path.parent} was in use by process {holder.process.pid} on {holder.process.host}; waiting "
            f"{format_seconds(_WATCHED_S)} to see whether it still runs"
        )
        end = time.monotonic() + _WATCHED_S
        with suppress(FileNotFoundError):  # it has ended now
            beat_ns = self.path.stat().st_mtime_ns
            while time.monotonic() < end:
                time.sleep(min(1.0, _WATCHED_S / 10))
                self.path.read_bytes()  # network file systems return old times of files that are not opened
                if self.path.stat().st_mtime_ns != beat_ns:
                    return False
        return True


def _write_new(path: Path, token: str) -> None:
    """Create a file that names this process and a token; raise `FileExistsError` if it exists."""
    text = json.dumps({**asdict(this_process()), "token": token, "since": time.time()}).encode()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, text)
        os.fsync(descriptor)
    except OSError:  # a full disk: others would wait for the empty file
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[bytes, LockHolder | None] | None:
    """Return a lock file's bytes and its holder (None if the content is invalid); None if there is no file."""
    try:
        raw, silent_s = path.read_bytes(), time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        content: dict[str, Any] = json.loads(raw)
        process = Process(int(content["pid"]), str(content["host"]), str(content["began"]))
        return raw, LockHolder(process, str(content["token"]), silent_s)
    except (ValueError, LookupError, TypeError):
        return raw, None


@contextmanager
def _folder_flock(folder: Path) -> Iterator[None]:
    """Let one process of this host at a time change the lock file; without flock, only the claim files protect it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # explicit, because a process forked just now inherits the descriptor and the flock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
