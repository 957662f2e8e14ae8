"""The uploader process, started by `tracking/upload/uploader.py`: uploads a run until it ends, retrying failures."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from trimtab.addresses import redact
from trimtab.runs.run_folder import actual_state
from trimtab.runs.tracking_file import RunDescription, upload_lock
from trimtab.tracking.mlflow.server import UploadFailure, describe_failure, mlflow_environment
from trimtab.tracking.upload.run_upload import RunUpload, close_killed, open_tracking

_EVERY_S = 2.0  # seconds between two batches
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # seconds after a failure
# seconds to finish after the training process has died; a resumed run waits a little longer for the upload lock
_ORPHAN_S = 25.0
_QUIET_S, _LONGEST_QUIET_S = 30.0, 600.0  # how long a repeated outage must last before it is reported
_DYING_S = 4.0  # the pipes of a process close a moment before its pid disappears


class ParentPipe:
    """Receives from the training process that the run has ended, and detects that the process has died."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parent = os.getppid()
        self._changed = threading.Event()
        self.is_over = False
        self.is_orphan = False

    def listen(self) -> None:
        """Start the threads that listen."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Wait for a change, at most for some seconds."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _read(self) -> None:
        for line in self._stream:
            if json.loads(line).get("finish"):
                self.is_over = True
                self._changed.set()
        self._on_death()

    def _watch(self) -> None:
        # the end of the pipe is not enough: forked data workers of a dead training may hold it open
        while os.getppid() == self._parent:
            time.sleep(0.5)
        self._on_death()

    def _on_death(self) -> None:
        if self.is_over:
            os._exit(1)  # the training has stopped waiting for the last upload
        self.is_orphan = True
        self._changed.set()
        time.sleep(_ORPHAN_S)
        os._exit(1)  # even in the middle of a request: the run may be about to resume


class MessageWriter:
    """Write JSON messages to the training process, one per line; redirect mlflow's output to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __call__(self, **message: Any) -> None:
        """Send a message."""
        with contextlib.suppress(OSError):
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()

    def say(self, text: str) -> None:
        """Send a line for the user."""
        self(say=text)


class Backoff:
    """Exponential backoff that reports an outage once when it begins and once when it ends.

    On a nearly full disk some attempts succeed. So after the first outage, the next ones are reported only if they
    last, and each time they must last longer.

    Args:
        say: Called with a line for the user.
        begins: Consequence for the user, reported after the reason of an outage.
        ends: Reported when an attempt succeeds again.
    """

    def __init__(self, say: Callable[[str], None], begins: str, ends: str) -> None:
        self._say, self._begins, self._ends = say, begins, ends
        self._reported = ""
        self._recovery = ends
        self._failing_since: float | None = None
        self._quiet_s = 0.0
        self._next_at = 0.0
        self.wait_s = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt has failed."""
        return self.wait_s > 0

    @property
    def is_due(self) -> bool:
        """Whether the next attempt may be made."""
        return time.monotonic() >= self._next_at

    def record(self, failures: Sequence[UploadFailure]) -> None:
        """Record the failures of an attempt, or its success if there are none."""
        if not failures:
            if self._reported:
                self._say(f"tracking: {self._recovery}")
                self._quiet_s = min(_LONGEST_QUIET_S, max(_QUIET_S, 2 * self._quiet_s))
            self._reported, self.wait_s, self._failing_since = "", 0.0, None
            return
        needs_user = any(failure.cure for failure in failures)
        first_wait_s = _FIRST_WAIT_S * (10 if needs_user else 1)
        self.wait_s = min(_LONGEST_WAIT_S, self.wait_s * 2 if self.is_failing else first_wait_s)
        now = time.monotonic()
        self._next_at = now + self.wait_s
        self._failing_since = now if self._failing_since is None else self._failing_since
        is_new = not self._reported and now - self._failing_since >= self._quiet_s
        if is_new or (needs_user and str(failures[0]) != self._reported):
            self._reported, self._recovery = str(failures[0]), failures[0].recovery or self._ends
            self._say(f"tracking: {'; '.join(map(str, failures))}; {self._begins}")


def main() -> None:
    """Upload the run that the first line of stdin describes, until it ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the training process receives them too, and ends this process properly
    writer = MessageWriter()
    with contextlib.suppress(OSError):
        os.nice(5)
    job = json.loads(sys.stdin.readline())
    parent = ParentPipe(sys.stdin)
    parent.listen()
    writer(progress=True)
    folder = Path(job["folder"])
    with mlflow_environment(job["uri"]), upload_lock(folder, patience_s=60.0):
        upload_until_over(folder, job["uri"], RunDescription(**job["about"]), parent, writer)


def upload_until_over(folder: Path, uri: str, about: RunDescription, parent: ParentPipe, writer: MessageWriter) -> None:
    """Upload a run until it has ended and everything is uploaded, or the training process has died."""
    tracking = open_tracking(folder, about, uri)
    import mlflow  # noqa: F401  # takes seconds, in which the run may have ended already

    writer(progress=True)
    upload = RunUpload(tracking, uri, writer.say, on_upload=lambda: writer(upload=True))
    server = Backoff(writer.say, "training continues, metrics are kept in the run folder", f"{redact(uri)} is back")
    files = Backoff(writer.say, "they are uploaded later", "all files are uploaded now")
    is_new, progress = True, upload.progress()
    while not parent.is_orphan:
        is_over = parent.is_over  # read before the journal, so that its last lines are not missed
        try:
            more = upload.upload_metrics()
            if not more and (is_new or is_over or (files.is_failing and files.is_due)):
                is_finished = is_over and actual_state(folder)[0] == "finished"
                files.record(upload.upload_files(is_over=is_over, with_model=is_finished))
            if is_new and not more:
                close_killed((inner for inner in folder.parent.iterdir() if inner != folder), uri)
                is_new = False
            if is_over and not more:
                upload.close()
                if not files.is_failing:
                    server.record([])
                    writer(done=True)
                    return
            server.record([])  # only here: the failure may have been in a step after the metrics
            wait_s = 0.0 if more else min(files.wait_s, _EVERY_S) if is_over else _EVERY_S
        except Exception as error:
            failure = describe_failure(error, uri)
            if failure.is_gone:
                upload.detach()
            server.record([failure])
            wait_s = min(server.wait_s, _EVERY_S) if is_over else server.wait_s
        now = upload.progress()
        writer(**({"progress": True} if now != progress else {"failure": True, "was_there": upload.is_attached}))
        progress = now
        parent.wait(wait_s)
    _close_orphan(upload, folder)


def _close_orphan(upload: RunUpload, folder: Path) -> None:
    """Upload the last lines of a run whose process has died, and close it.

    A process that dies between the end of its run and the last upload (it may be generating samples) leaves files and a
    best model, which are uploaded as well, within the time that an orphan has; `track sync` uploads the rest.
    """
    with contextlib.suppress(Exception):
        while upload.upload_metrics():
            pass
    deadline = time.monotonic() + _DYING_S
    while actual_state(folder)[0] == "running" and time.monotonic() < deadline:
        time.sleep(0.05)
    with contextlib.suppress(Exception):
        upload.close()
        if actual_state(folder)[0] == "finished":
            upload.upload_files(is_over=True, with_model=True)


if __name__ == "__main__":
    main()
