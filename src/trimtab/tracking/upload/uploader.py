"""The process beside a training that brings its numbers to a tracking server, and the thread that listens to it.

A process of its own and not a thread: importing mlflow and writing rows is Python, and a training step waits for every
moment in which another thread runs Python. Nothing of mlflow's logging, memory or environment reaches the training.
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
from typing import Any, Protocol

from trimtab.addresses import redact
from trimtab.log import say
from trimtab.tracking.mlflow.uri import sqlite_file
from trimtab.tracking.upload.attachment import About, Tracking

_END_S = 10.0  # without any progress, after which a run that is over does not wait for its server
_END_OF_FILE_S = 60.0  # a sqlite file cannot be away: it is being made, or another run is writing
_NEVER_THERE = 2  # tries at the end, of a server that has not answered once
_SAID_AFTER_S = 2.0
_UPLOAD_S = 3600.0  # a file is on its way, and mlflow itself gives up on a server that does not answer
_LOG = "tracking.log"


class Companion(Protocol):
    """Goes along with a run, and brings its numbers elsewhere."""

    def start(self) -> None:
        """The journal is open."""

    def finish(self) -> None:
        """The run is over, and its folder says how it ended."""


class NoCompanion:
    """A run that goes nowhere else."""

    def start(self) -> None:
        """Nothing is tracked."""

    def finish(self) -> None:
        """Nothing is tracked."""


class MlflowCompanion:
    """Starts the process that ships a run, says what it has to say, and at the end waits for it, but not for long.

    Args:
        folder: The run's folder.
        uri: The server.
        about: What is known of the run; of a run that goes on, its name for MLflow and its beginning stay.
        end_s: How long to wait, at the end, for a server that does not answer; by default long enough.
    """

    def __init__(self, folder: Path, uri: str, about: About, end_s: float | None = None) -> None:
        self._folder, self._uri, self._about = folder, uri, about
        self._end_s = end_s or (_END_S if sqlite_file(uri) is None else _END_OF_FILE_S)
        self._process: subprocess.Popen[str] | None = None
        self._heard: queue.Queue[dict[str, Any]] = queue.Queue()
        self._listener: threading.Thread | None = None
        self._is_ending = False

    def start(self) -> None:
        """Start the process; nobody waits for it."""
        command = [sys.executable, "-P", "-m", "trimtab.tracking.upload.process"]  # -P: no modules of the user's folder
        # no GPU: what it does with the model needs none, and the memory there is planned to the last byte
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
        try:
            log = (self._folder / _LOG).open("ab")
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
                text=True,
                start_new_session=True,  # Ctrl-C is for the training, which then tells it
            )
            log.close()
        except OSError as error:
            say(f"nothing is tracked for now ({error}); later: trimtab track sync {self._folder}")
            return
        self._tell({"folder": str(self._folder), "uri": self._uri, "about": asdict(self._about)})
        self._listener = threading.Thread(target=self._listen, name="trimtab-tracking", daemon=True)
        self._listener.start()

    def finish(self) -> None:
        """Let it send what is left, as long as that goes on."""
        process = self._process
        if process is None:
            return
        self._is_ending = True
        self._tell({"finish": True})
        try:
            self._wait()
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
        self._last_words()

    def _tell(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended; `_listen` says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _listen(self) -> None:
        """What the process says, until it ends."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        with contextlib.suppress(ValueError, OSError):
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    message = json.loads(line)
                    if "say" in message:
                        say(message["say"])
                    if self._is_ending:  # before that nobody waits
                        self._heard.put(message)
        self._heard.put({"ended": True})
        if not self._is_ending:
            say(f"tracking has ended by itself, see {self._folder / _LOG}; the numbers are safe in {self._folder}")

    def _wait(self) -> None:
        """Until it is done, or nothing has gone forward for a while."""
        began = last = time.monotonic()
        is_uploading = is_said = False
        num_in_vain = 0
        while True:
            now = time.monotonic()
            end = now + _UPLOAD_S if is_uploading else last + self._end_s
            try:
                message = self._heard.get(timeout=max(0.0, (end if is_said else min(end, began + _SAID_AFTER_S)) - now))
            except queue.Empty:
                if is_said or time.monotonic() >= end:
                    return
                is_said = True
                say(f"sending what is left to {redact(self._uri)} …")
                continue
            if "ended" in message or "done" in message:
                return
            is_uploading = "upload" in message or (is_uploading and "say" in message)
            if "progress" in message:
                last = time.monotonic()
            # a file is not away: it is locked, or being made
            num_in_vain += "trouble" in message and not message["was_there"] and sqlite_file(self._uri) is None
            if num_in_vain >= _NEVER_THERE:
                return

    def _last_words(self) -> None:
        from trimtab.tracking.upload.shipper import what_waits

        tracking = Tracking.read(self._folder)
        if tracking is None:
            say(f"nothing was tracked on {redact(self._uri)} yet: trimtab track sync {self._folder}")
            return
        waiting = what_waits(tracking, self._uri, with_model=self._about.log_model and _is_finished(self._folder))
        if str(waiting):
            say(f"{waiting} wait for {redact(self._uri)}: trimtab track sync {self._folder}")
        else:
            with contextlib.suppress(OSError):
                (self._folder / _LOG).unlink()


def _is_finished(folder: Path) -> bool:
    from trimtab.runs.run_folder import how_it_stands

    return how_it_stands(folder)[0] == "finished"
