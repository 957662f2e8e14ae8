"""A run's folder belongs to one process at a time: a lock file says which, and a lock of a dead process is no lock."""

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

from trimtab.checkpoint.disk_errors import cure_of
from trimtab.checkpoint.process_identity import Process, this_process
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.units import format_seconds

LOCK = "run.lock"
_HALF_WRITTEN_S = 2.0  # a lock that names nobody for so long was left by a process that died while it wrote it
_CLAIM_S = 60.0  # replacing a stale lock takes milliseconds
_held: set[str] = set()  # tokens of the locks that this process holds


@dataclass(frozen=True)
class LockHolder:
    """Who holds a folder.

    Attributes:
        process: The process.
        token: Tells this lock from any other.
        silent_s: Seconds since the last sign of life, by the file system's clock and this machine's.
    """

    process: Process
    token: str
    silent_s: float

    @property
    def state(self) -> str:
        """`running`; `dead`; or `elsewhere`: on another machine, where nobody here can tell."""
        if not self.process.is_here:
            return "elsewhere"
        if self.process == this_process() and self.token not in _held:
            return "dead"  # an earlier run of this very process, as in a notebook
        return "running" if self.process.is_running() else "dead"


def lock_holder(folder: str | os.PathLike[str]) -> LockHolder | None:
    """Who holds a folder, dead or alive; None if nobody does."""
    found = _read(Path(folder) / LOCK)
    return found[1] if found is not None else None


class RunLock:
    """Holds a run's folder while the run goes on; used with `with`, or by `acquire` and `release`.

    Args:
        folder: The run's folder, which has to exist.
        take_over: Take the folder from a process on another machine, which the user knows to be over.
        patience_s: Take it from a process on another machine by itself after so many seconds without a sign of life
            (see `beat`); None never does.
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
        """Take the folder.

        Raises:
            CheckpointError: Another process holds it, or no file can be made there.
        """
        token, patience = uuid.uuid4().hex, time.monotonic() + _HALF_WRITTEN_S
        try:
            with _alone(self.path.parent):
                while not (self._create(token) or self._replace_stale(token, patience)):
                    pass
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be made: {error.strerror or error}",
                cure_of(error, "choose another --out"),
            ) from error
        self._token = token
        _held.add(token)
        if not self.is_held():
            _held.discard(token)
            raise CheckpointError(f"{self.path} was taken by another process just now", "run it again")

    def is_held(self) -> bool:
        """Whether the lock file is still this one's; asks the disk."""
        holder = lock_holder(self.path.parent)
        return holder is not None and holder.token == self._token

    def beat(self) -> None:
        """Give a sign of life, for those who look from another machine."""
        with suppress(OSError):
            os.utime(self.path)

    def release(self) -> None:
        """Give the folder back; a lock that is no longer ours, or is our parent's, stays."""
        try:
            holder = lock_holder(self.path.parent)
            if holder is not None and holder.token == self._token and holder.process == this_process():
                self.path.unlink(missing_ok=True)
        except OSError as error:  # the work is done: what is left counts only until this process has ended
            say(
                f"{self.path} cannot be removed: {error.strerror or error}; on this machine it no longer counts once "
                "this process has ended, for another machine delete it by hand"
            )
        _held.discard(self._token)
        self._token = ""

    def _create(self, token: str) -> bool:
        """Make the lock file; False if there is one."""
        try:
            _write_new(self.path, token)
        except FileExistsError:
            return False
        return True

    def _replace_stale(self, token: str, patience: float) -> bool:
        """Put this lock in the place of one whose holder is dead; say who it is if it is alive.

        Only who has made the claim on a stale lock may replace it, and looks again once it has it: two can find the
        same lock stale, and the slower must not remove the lock of the faster.

        Args:
            token: Of this lock.
            patience: Until when a lock that names nobody may be one that is just being written.

        Returns:
            Whether it was replaced; if not, the folder may be free, or another's, by now.
        """
        found = _read(self.path)
        if found is None:
            return False
        raw, holder = found
        if holder is None and time.monotonic() < patience:
            time.sleep(0.05)  # another process may have made it and be about to write
            return False
        if holder is not None:
            self._refuse(holder)
        claim = self.path.with_name(f".{LOCK}.{zlib.crc32(raw):08x}")
        try:
            _write_new(claim, token)
        except FileExistsError:
            self._wait_for(claim)
            return False
        again = _read(self.path)
        if again is None or again[0] != raw:
            claim.unlink(missing_ok=True)
            return False
        try:
            claim.replace(self.path)
        except OSError:  # nobody is to wait for a claim that came to nothing
            claim.unlink(missing_ok=True)
            raise
        return True

    def _wait_for(self, claim: Path) -> None:
        """Let another finish what takes it a moment; a claim that outlives that is of a process that was killed."""
        with suppress(FileNotFoundError):
            if time.time() - claim.stat().st_mtime > _CLAIM_S:
                claim.unlink()
        time.sleep(0.01)

    def _refuse(self, holder: LockHolder) -> None:
        """Say who holds the folder, unless it may be taken."""
        process, state = holder.process, holder.state
        if state == "running":
            raise CheckpointError(
                f"{self.path.parent} is in use by process {process.pid} of this machine",
                f"wait until it is done, or stop it (kill {process.pid}), or choose another --out",
            )
        may_take = self._take_over or (self._patience_s is not None and holder.silent_s > self._patience_s)
        if state == "elsewhere" and not may_take:
            raise CheckpointError(
                f"{self.path.parent} is in use by process {process.pid} on {process.host}, whose last sign of life is "
                f"{format_seconds(max(0.0, holder.silent_s))} old",
                f"see that it has ended there (machine switched off, job cancelled), then delete {self.path}",
            )


def _write_new(path: Path, token: str) -> None:
    """Make a file that names this process and a token; `FileExistsError` if there is one."""
    text = json.dumps({**asdict(this_process()), "token": token, "since": time.time()}).encode()
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    try:
        os.write(descriptor, text)
        os.fsync(descriptor)
    except OSError:  # a full disk: nobody is to wait for an empty lock
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _read(path: Path) -> tuple[bytes, LockHolder | None] | None:
    """A lock file's bytes, and who they name: None if nobody. None if there is no file."""
    try:
        raw, silent_s = path.read_bytes(), time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return None
    try:
        said: dict[str, Any] = json.loads(raw)
        process = Process(int(said["pid"]), str(said["host"]), str(said["began"]))
        return raw, LockHolder(process, str(said["token"]), silent_s)
    except (ValueError, LookupError, TypeError):
        return raw, None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process of this machine at a time; where the file system has no such locks, the lock file has to do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # closing alone would not do it, should a worker be forked in this moment
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)
