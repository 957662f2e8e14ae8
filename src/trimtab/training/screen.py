"""The place where frames of progress bars replace each other: a terminal, or the output of a notebook cell."""

import contextlib
import importlib
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

from trimtab.log import logger, printable
from trimtab.training.progress_lines import LineWriter, discard_stdout

SECONDS_BETWEEN_FRAMES = 0.2  # a frame takes one to two milliseconds to draw: less than 1% of the time


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


def build_console(**options: Any) -> Any:
    """Return a console of rich that escapes control characters of what it draws, but not those with which it draws."""
    from rich.console import Console
    from rich.segment import Segment

    class SafeConsole(Console):
        def _render_buffer(self, buffer: Iterable[Segment]) -> str:
            if not self.is_terminal:
                return super()._render_buffer(buffer)
            safe = (part if part.control else part._replace(text=printable(part.text, keep="\n")) for part in buffer)
            return super()._render_buffer(safe)

    return SafeConsole(**options)


def build_screen(*, transient: bool = False) -> "Screen":
    """Return the screen of this process.

    Args:
        transient: Whether a terminal removes the last frame when the screen is closed.
    """
    return _NotebookScreen() if is_notebook() else _TerminalScreen(transient)


def table_of_bars(rows: Iterable[tuple[Any, ...]]) -> Any:
    """Return a frame of rows, each with a name, a bar, a count and the time left."""
    from rich.table import Table

    bars = Table.grid(expand=True, padding=(0, 1))
    for ratio in (None, 1, None, None):  # the bar takes the remaining width
        bars.add_column(ratio=ratio, no_wrap=True)
    for row in rows:
        bars.add_row(*row)
    return bars


class Screen:
    """A display of frames that replace each other. This base class, for before and after a run, draws nothing."""

    def open(self, frame: Any) -> None:
        """Draw the first frame."""

    def show(self, frame: Any) -> None:
        """Replace the frame."""

    def line(self, text: str, style: str) -> None:
        """Write a line above the frame, or below it in a notebook."""
        LineWriter().write(text)

    def close(self, last_frame: Callable[[], Any]) -> None:
        """Draw the last frame, and allow other output to follow."""


class _TerminalScreen(Screen):
    """A live display of rich. Lines, including those of trimtab's logger, are written above the frame."""

    def __init__(self, transient: bool) -> None:
        from rich.live import Live

        self._console = build_console(highlight=False, markup=False, emoji=False)
        self._console.on_broken_pipe = discard_stdout  # rich would end the process
        self._is_open = True
        # if standard error goes to a file, it still does
        to_console = sys.stderr is not None and sys.stderr.isatty()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=to_console, transient=transient)

    def open(self, frame: Any) -> None:
        self._stderr = sys.stderr
        self._live.update(frame)
        self._guarded(lambda: self._live.start(refresh=True))
        self._redirected = sys.stderr
        _move_handlers(self._stderr, self._redirected)

    def show(self, frame: Any) -> None:
        self._guarded(lambda: self._live.update(frame, refresh=True))

    def line(self, text: str, style: str) -> None:
        self._guarded(lambda: self._console.print(text, style=style or None))

    def close(self, last_frame: Callable[[], Any]) -> None:
        self._live.update(last_frame())
        self._guarded(self._live.stop)
        _move_handlers(self._redirected, self._stderr)

    def _guarded(self, draw: Callable[[], None]) -> None:
        """Draw; a terminal that was closed must not end the run."""
        if not self._is_open:
            return
        try:
            draw()
        except (OSError, ValueError):
            self._is_open = False
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()  # restores standard output even if it cannot draw


def _move_handlers(old: Any, new: Any) -> None:
    """Make log handlers write to `new`: they keep their original stream, which would break the live display."""
    if old is not new:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


class _NotebookScreen(Screen):
    """One output of the cell, updated in place; lines follow below it. Needs no widgets."""

    def open(self, frame: Any) -> None:
        display = importlib.import_module("IPython.display").display
        self._handle: Any = display(frame, display_id=True)

    def show(self, frame: Any) -> None:
        self._handle.update(frame)

    def close(self, last_frame: Callable[[], Any]) -> None:
        self._handle.update(last_frame())
