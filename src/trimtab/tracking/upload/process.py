"""The process that `tracking/upload/uploader.py` starts: ships a run until it is over, however its server behaves."""

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
from trimtab.runs.run_folder import how_it_stands
from trimtab.tracking.mlflow.server import Trouble, mlflow_settings, trouble_of
from trimtab.tracking.upload.attachment import About, shipping
from trimtab.tracking.upload.shipper import Shipment, close_killed, open_tracking

_EVERY_S = 2.0  # between two batches
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0  # after a failure
_ORPHAN_S = 25.0  # less than a run that goes on waits for it
_QUIET_S, _LONGEST_QUIET_S = 30.0, 600.0  # a failure that comes back is said if it lasts so long
_DYING_S = 4.0  # a process closes its pipes a moment before it counts as dead


class Ears:
    """What the training says: that it is over, or, by its silence, that it is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._parent = os.getppid()
        self._changed = threading.Event()
        self.is_over = False
        self.is_orphan = False

    def listen(self) -> None:
        """Begin to listen."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, daemon=True).start()

    def wait(self, seconds: float) -> None:
        """Until something is said, or the time is over."""
        self._changed.wait(seconds)
        self._changed.clear()

    def _read(self) -> None:
        for line in self._stream:
            if json.loads(line).get("finish"):
                self.is_over = True
                self._changed.set()
        self._lose()

    def _watch(self) -> None:
        """Workers that the training has forked hold its end of the pipe open, also when it is gone."""
        while os.getppid() == self._parent:
            time.sleep(0.5)
        self._lose()

    def _lose(self) -> None:
        if self.is_over:
            os._exit(1)  # it was waited for, and no longer is
        self.is_orphan = True
        self._changed.set()
        time.sleep(_ORPHAN_S)
        os._exit(1)  # whatever it waits for: the run may be about to go on


class Mouth:
    """Speaks to the training, one JSON object a line; what mlflow prints goes to the log."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def __call__(self, **message: Any) -> None:
        """One message."""
        with contextlib.suppress(OSError):
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()

    def say(self, text: str) -> None:
        """A line for the user."""
        self(say=text)


class Patience:
    """Waits longer after each failure; says one line when they begin, and one when they are over.

    On a disk that is full to the brim some tries succeed. So after the first time failures are said only if they last,
    and each time they have to last longer.

    Args:
        say: Takes a line for the user.
        begins: What follows for the user, after the reason.
        ends: What to say when it works again.
    """

    def __init__(self, say: Callable[[str], None], begins: str, ends: str) -> None:
        self._say, self._begins, self._ends = say, begins, ends
        self._said = ""
        self._over = ends
        self._failing_since: float | None = None
        self._quiet_s = 0.0
        self._until = 0.0
        self.wait_s = 0.0

    @property
    def is_failing(self) -> bool:
        """Whether the last try has failed."""
        return self.wait_s > 0

    @property
    def is_due(self) -> bool:
        """Whether it may be tried again."""
        return time.monotonic() >= self._until

    def note(self, troubles: Sequence[Trouble]) -> None:
        """What went wrong in a try, if anything."""
        if not troubles:
            if self._said:
                self._say(f"tracking: {self._over}")
                self._quiet_s = min(_LONGEST_QUIET_S, max(_QUIET_S, 2 * self._quiet_s))
            self._said, self.wait_s, self._failing_since = "", 0.0, None
            return
        slowly = any(trouble.cure for trouble in troubles)  # somebody has to do something first
        self.wait_s = min(
            _LONGEST_WAIT_S, self.wait_s * 2 if self.is_failing else _FIRST_WAIT_S * (10 if slowly else 1)
        )
        now = time.monotonic()
        self._until = now + self.wait_s
        self._failing_since = now if self._failing_since is None else self._failing_since
        is_new = not self._said and now - self._failing_since >= self._quiet_s
        if is_new or (slowly and str(troubles[0]) != self._said):
            self._said, self._over = str(troubles[0]), troubles[0].over or self._ends
            self._say(f"tracking: {'; '.join(map(str, troubles))}; {self._begins}")


def main() -> None:
    """Ship a run until it is over; what to ship comes as the first line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the training gets them too, and says what is to be done
    mouth = Mouth()
    with contextlib.suppress(OSError):
        os.nice(5)
    hello = json.loads(sys.stdin.readline())
    ears = Ears(sys.stdin)
    ears.listen()
    mouth(progress=True)
    with mlflow_settings(), shipping(Path(hello["folder"]), patience_s=60.0):
        ship(Path(hello["folder"]), hello["uri"], About(**hello["about"]), ears, mouth)


def ship(folder: Path, uri: str, about: About, ears: Ears, mouth: Mouth) -> None:
    """Ship a run until it is over, or its training is gone.

    Args:
        folder: The run's folder.
        uri: The server.
        about: What is known of the run.
        ears: Tell how the training stands.
        mouth: Tells the training how the shipping stands.
    """
    tracking = open_tracking(folder, about, uri)
    import mlflow  # noqa: F401  # seconds, in which the training may have ended already

    mouth(progress=True)
    shipment = Shipment(tracking, uri, mouth.say, on_upload=lambda: mouth(upload=True))
    server = Patience(mouth.say, "training goes on, its numbers wait in the run's folder", f"{redact(uri)} is back")
    files = Patience(mouth.say, "they are sent later", "all files are sent now")
    is_new, progress = True, shipment.progress()
    while not ears.is_orphan:
        is_over = ears.is_over  # asked before the journal is read, so that nothing is missed
        try:
            more = shipment.ship_numbers()
            if not more and (is_new or is_over or (files.is_failing and files.is_due)):
                is_finished = is_over and how_it_stands(folder)[0] == "finished"
                files.note(shipment.ship_files(is_over=is_over, with_model=is_finished))
            if is_new and not more:
                close_killed((inner for inner in folder.parent.iterdir() if inner != folder), uri)
                is_new = False
            if is_over and not more:
                shipment.close()
                if not files.is_failing:
                    server.note([])
                    mouth(done=True)
                    return
            server.note([])  # only now: what failed the last time may come after the numbers
            wait_s = 0.0 if more else min(files.wait_s, _EVERY_S) if is_over else _EVERY_S
        except Exception as error:
            trouble = trouble_of(error, uri)
            if trouble.kind == "gone":
                shipment.start_anew()
            server.note([trouble])
            wait_s = min(server.wait_s, _EVERY_S) if is_over else server.wait_s
        now = shipment.progress()
        mouth(**({"progress": True} if now != progress else {"trouble": True, "was_there": shipment.is_attached}))
        progress = now
        ears.wait(wait_s)
    with contextlib.suppress(Exception):  # its last lines, for which nobody may come back
        while shipment.ship_numbers():
            pass
    end = time.monotonic() + _DYING_S
    while how_it_stands(folder)[0] == "running" and time.monotonic() < end:
        time.sleep(0.05)
    with contextlib.suppress(Exception):
        shipment.close()


if __name__ == "__main__":
    main()
