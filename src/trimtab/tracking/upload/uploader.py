"""Start the uploader process of a run, show its messages, and wait for it at the end.

It is a subprocess, not a thread: importing mlflow and writing rows is Python code, which would hold the GIL while a
training step needs it. Also, mlflow's logging, memory and environment do not affect training.
"""

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.errors import as_argument
from trimtab.log import say
from trimtab.runs.consent import add_address
from trimtab.runs.run_folder import actual_state
from trimtab.runs.tracking_file import RunDescription, Tracking
from trimtab.tracking.mlflow.uri import sqlite_file
from trimtab.tracking.upload.run_upload import describe_missing

_END_S = 10.0  # without progress, after which a run that has ended stops waiting for its server
_END_OF_FILE_S = 60.0  # the same for a sqlite file, which is being created or locked by another run
_MAX_ATTEMPTS = 2  # at the end, for a server that has never responded
_SAID_AFTER_S = 2.0
_UPLOAD_S = 3600.0  # for a file in transit: mlflow itself gives up on a server that does not respond
_LOG = "tracking.log"


class MlflowUploader:
    """Upload a run to MLflow from a subprocess.

    Args:
        folder: The run folder.
        uri: The server.
        about: Facts of the run; a resumed run keeps its id and start time.
        end_s: How long `finish` waits for a server that does not respond; None chooses by the kind of server.
    """

    def __init__(self, folder: Path, uri: str, about: RunDescription, end_s: float | None = None) -> None:
        self._folder, self._uri, self._about = folder, uri, about
        self._end_s = end_s or (_END_S if sqlite_file(uri) is None else _END_OF_FILE_S)
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
        self._listener: threading.Thread | None = None
        self._is_ending = False
        self._sync = f"trimtab track sync {as_argument(folder)}"

    def start(self) -> None:
        """Start the process without waiting for it."""
        add_address(self._folder, self._uri)
        command = [sys.executable, "-P", "-m", "trimtab.tracking.upload.process"]  # -P: no modules from the cwd
        # no GPU: packing the model needs none, and the planner has assigned the whole memory budget to the training
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        try:
            with (self._folder / _LOG).open("ab") as log:
                self._process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    text=True,
                    start_new_session=True,  # only the training process gets Ctrl-C, and then ends this process
                )
        except OSError as error:
            say(f"the uploader cannot be started ({error}); upload later: {self._sync}")
            return
        self._send({"folder": str(self._folder), "uri": self._uri, "about": asdict(self._about)})
        self._listener = threading.Thread(target=self._listen, name="trimtab-tracking", daemon=True)
        self._listener.start()

    def finish(self) -> None:
        """Wait until everything is uploaded, nothing makes progress, or Ctrl-C; then report what is missing."""
        process = self._process
        if process is None:
            return
        self._is_ending = True
        self._send({"finish": True})
        try:
            self._wait()
        except KeyboardInterrupt:  # the run has ended, and everything is in its folder
            say("the upload was interrupted")
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            if self._listener is not None:
                self._listener.join(5.0)
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    assert pipe is not None
                    pipe.close()
            self._process = None
        self._report_missing()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the process has died, which `_listen` reports
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """Show the messages of the process, and keep those that `finish` waits for."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if "say" in message:
                        say(message["say"])
                    if self._is_ending:
                        self._messages.put(message)
        self._messages.put({"ended": True})
        if not self._is_ending:
            say(f"the uploader process has died, see {self._folder / _LOG}; metrics are kept in {self._folder}")

    def _wait(self) -> None:
        """Wait until the process is done, or has made no progress for a while."""
        began = last = time.monotonic()
        is_uploading = is_said = False
        num_attempts = 0
        while True:
            now = time.monotonic()
            end = now + _UPLOAD_S if is_uploading else last + self._end_s
            timeout_s = (end if is_said else min(end, began + _SAID_AFTER_S)) - now
            try:
                message = self._messages.get(timeout=max(0.0, timeout_s))
            except queue.Empty:
                if is_said or time.monotonic() >= end:
                    return
                is_said = True
                say(f"uploading the remaining metrics and files to {redact(self._uri)} … (Ctrl-C skips this)")
                continue
            if "ended" in message or "done" in message:
                return
            is_uploading = "upload" in message or (is_uploading and "say" in message)
            if "progress" in message:
                last = time.monotonic()
            # a sqlite file that does not respond is locked or being created, and worth waiting for
            num_attempts += "failure" in message and not message["was_there"] and sqlite_file(self._uri) is None
            if num_attempts >= _MAX_ATTEMPTS:
                return

    def _report_missing(self) -> None:
        tracking = Tracking.read(self._folder)
        if tracking is None:
            say(f"nothing was uploaded to {redact(self._uri)} yet: {self._sync}")
            return
        is_finished = actual_state(self._folder)[0] == "finished"
        missing = describe_missing(tracking, self._uri, with_model=self._about.log_model and is_finished)
        if missing:
            say(f"not uploaded to {redact(self._uri)} yet: {missing}; upload later: {self._sync}")
        else:
            with contextlib.suppress(OSError):
                (self._folder / _LOG).unlink()
