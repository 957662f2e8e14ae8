"""Progress of work without steps, such as a pass over rows or layers: bars in a terminal, else a few log lines."""

import atexit
import contextlib
import time
from collections.abc import Iterable, Iterator, Sized
from contextvars import ContextVar
from typing import Any, TypeVar

from trimtab.log import is_muted, say
from trimtab.training.progress import draws_bars
from trimtab.training.screen import SECONDS_BETWEEN_FRAMES, Screen, build_screen, table_of_bars
from trimtab.units import format_seconds

T = TypeVar("T")

_SECONDS_BEFORE_BARS = 0.5  # shorter work is not shown
_SECONDS_BEFORE_LINES = 10.0
_NUM_LINES = 4  # log lines per piece of work, at equal shares of it
_mode: ContextVar[str] = ContextVar("mode", default="auto")


@contextlib.contextmanager
def work_shown_as(mode: str) -> Iterator[None]:
    """Choose how the work inside is shown.

    Args:
        mode: As in `build_progress`; "json" and "quiet" show nothing.
    """
    before = _mode.set(mode)
    try:
        yield
    finally:
        _mode.reset(before)


def work_mode() -> str:
    """The current mode, as in `build_progress`."""
    return "quiet" if is_muted() else _mode.get()


class Work:
    """A piece of work that is being done.

    Args:
        name: What is done, such as "sensitivity of layers".
        total: Number of its parts.
    """

    def __init__(self, name: str, total: int) -> None:
        self.name, self.total, self.num_done = name, total, 0
        self._started = time.monotonic()
        self._next_line = 1

    def advance(self, num: int = 1) -> None:
        """Count parts as done."""
        self.num_done += num
        if is_muted() or _mode.get() in ("json", "quiet"):
            return
        if _board.is_open or draws_bars(_mode.get()):  # an open screen replaces standard output
            _board.draw_if_old()
        elif self.num_done < self.total and self.num_done * _NUM_LINES >= self._next_line * self.total:
            self._next_line = self.num_done * _NUM_LINES // self.total + 1
            if time.monotonic() - self._started >= _SECONDS_BEFORE_LINES:
                say(f"{self.name}: {self.num_done:,} of {self.total:,}, {self.time_left_text()}")

    def time_left_text(self) -> str:
        """Format the time left; empty before the first part is done."""
        if not self.num_done:
            return ""
        seconds = (time.monotonic() - self._started) / self.num_done * (self.total - self.num_done)
        return f"{format_seconds(round(seconds) if seconds < 60 else 60 * round(seconds / 60))} left"


@contextlib.contextmanager
def working(name: str, total: int) -> Iterator[Work]:
    """Show a piece of work; work that begins inside is shown below it.

    Args:
        name: What is done.
        total: Number of its parts; call `advance` of the result for each.
    """
    work = Work(name, total)
    _board.add(work)
    try:
        yield work
    finally:
        _board.remove(work)


def tracked(items: Iterable[T], name: str, total: int | None = None) -> Iterator[T]:
    """Yield items, and show how many of them are done.

    Args:
        items: The parts of the work.
        name: What is done.
        total: Their number; by default their length.
    """
    if total is None:
        assert isinstance(items, Sized)
        total = len(items)
    with working(name, total) as work:
        for item in items:
            yield item
            work.advance()


class _Board:
    """All current work, in one frame. It is opened only for work that takes longer than a moment."""

    def __init__(self) -> None:
        self._works: list[Work] = []
        self._screen: Screen | None = None
        self._next_frame = 0.0

    @property
    def is_open(self) -> bool:
        return self._screen is not None

    def add(self, work: Work) -> None:
        if not self._works:
            self._next_frame = time.monotonic() + _SECONDS_BEFORE_BARS
        self._works.append(work)

    def remove(self, work: Work) -> None:
        self._works.remove(work)
        if not self._works:
            self.close()

    def close(self) -> None:
        screen, self._screen = self._screen, None
        if screen is not None:
            screen.close(self._frame)
            atexit.unregister(self.close)

    def draw_if_old(self) -> None:
        if time.monotonic() < self._next_frame:
            return
        if self._screen is None:
            self._screen = build_screen(transient=True)
            self._screen.open(self._frame())
            atexit.register(self.close)  # restores the cursor of the terminal if the process dies
        else:
            self._screen.show(self._frame())
        # measured from the end of drawing, so that a slow terminal never takes most of the time
        self._next_frame = time.monotonic() + SECONDS_BETWEEN_FRAMES

    def _frame(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        return table_of_bars(
            (
                Text(work.name),
                ProgressBar(total=work.total, completed=work.num_done),
                f"{work.num_done:,}/{work.total:,}",
                work.time_left_text(),
            )
            for work in self._works
        )


_board = _Board()
