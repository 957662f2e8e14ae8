"""Let SIGTERM and SIGHUP end a command as Ctrl-C does: temporary files are removed, and what was measured is kept."""

import os
import signal
import threading
import time
from types import FrameType
from typing import Any, Self

from trimtab.cli.output import flush_streams

_NAMES = ("SIGTERM", "SIGHUP")  # a scheduler ends a job, a terminal is closed
_SAME_REQUEST_S = 1.0  # a launcher forwards what the whole group of processes gets: the removal must not be interrupted


class EndSignals:
    """A context in which each of these signals raises KeyboardInterrupt, except one that follows at once.

    Training has its own handlers meanwhile, which save first. Signals that are ignored (nohup) stay ignored, and
    forked processes, such as workers that read data, end at once.

    Attributes:
        received: The signal that came; None if none did.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # others cannot set handlers
            numbers = [number for name in _NAMES if (number := getattr(signal, name, None)) is not None]
            for number in numbers:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, self._receive)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=self.__exit__)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._receive:
                signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        is_repeated = self.received is not None and time.monotonic() - self._since < _SAME_REQUEST_S
        if not is_repeated:
            self.received, self._since = signal.Signals(number), time.monotonic()
            raise KeyboardInterrupt

    def end_process(self) -> None:
        """End by the signal that came, if one did, so that whoever sent it sees that it ended this process."""
        if self.received is not None:
            flush_streams()
            signal.signal(self.received, signal.SIG_DFL)
            os.kill(os.getpid(), self.received)
