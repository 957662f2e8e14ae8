"""Signals that interrupt a run: it ends after the current step, and first saves a checkpoint if it saves any."""

import signal
import threading
import time
from types import FrameType
from typing import Any

from trimtab.log import say

_SAME_KEY_S = 1.0  # below torchrun one Ctrl-C arrives twice: from the terminal, and forwarded by the launcher
# Ctrl-C and the hang-up of a terminal; the signals that schedulers, clouds and containers send before they take a
# machine away
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")


class StopSignals:
    """A context in which the first signal is only recorded. A second SIGINT raises KeyboardInterrupt.

    It does nothing outside the main thread, where Python allows no signal handlers. Signals that are ignored stay
    ignored.

    Args:
        saves: Whether the interrupted work saves a checkpoint; the message mentions it.
    """

    def __init__(self, saves: bool = True) -> None:
        self._words = (
            "and saving (Ctrl-C again stops immediately, without saving)" if saves else "(Ctrl-C again: immediately)"
        )
        self.received: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():
            for name in _NAMES:
                number = getattr(signal, name, None)
                if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT and time.monotonic() - self._since > _SAME_KEY_S:
            raise KeyboardInterrupt
        if self.received is None:
            self.received, self._since = signal.Signals(number).name, time.monotonic()
            say(f"{self.received}: stopping after this step {self._words}")
