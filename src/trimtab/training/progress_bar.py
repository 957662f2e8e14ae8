"""Progress as a bar, in a terminal or a notebook."""

import atexit
import contextlib
import importlib
import logging
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from trimtab.log import logger
from trimtab.training.progress_lines import LineWriter, Progress, discard_stdout
from trimtab.training.progress_text import StepLine, evaluation_text, metrics_text, time_left_text

_SECONDS_BETWEEN_FRAMES = 0.2  # a frame takes one to two milliseconds to draw: less than 1% of the time


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


class BarProgress(Progress):
    """A bar with the metrics below it; evaluations and notes stay as lines above.

    Drawn within the calls and not by a thread, which would take time from the training loop.
    """

    def __init__(self) -> None:
        self._screen = _Screen()
        self._start_step = 0
        self._line: StepLine | None = None
        self._num_evaluated: int | None = None
        self._next_frame = 0.0

    def start(self, num_steps: int, start_step: int = 0) -> None:
        """Open the bar."""
        self._close()
        super().start(num_steps)
        self._start_step = start_step
        self._line = self._num_evaluated = None
        self._screen = _NotebookScreen() if is_notebook() else _TerminalScreen()
        self._screen.open(self._frame())
        atexit.register(self._close)  # restores the cursor of the terminal if the process dies
        self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def step(self, line: StepLine) -> None:
        """Store the metrics, and draw if the last frame is old enough."""
        self._line = line
        self._draw_if_old()

    def eval_progress(self, num_done: int) -> None:
        """Store the count, and draw if the last frame is old enough."""
        self._num_evaluated = num_done
        self._draw_if_old()

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write a line and remove the bar of the evaluation."""
        self._num_evaluated = None
        self._screen.line(evaluation_text(metrics, step, improved), "green" if improved else "")
        self._draw()

    def note(self, text: str) -> None:
        """Write a line."""
        self._screen.line(text, "")

    def finish(self, summary: str, failed: bool = False) -> None:
        """Draw the last frame, close the bar and write the summary below it."""
        self._close()
        LineWriter().write(summary)

    def _close(self) -> None:
        self._num_evaluated = None
        self._screen.close(self._frame)
        self._screen = _Screen()
        atexit.unregister(self._close)

    def _draw_if_old(self) -> None:
        if time.monotonic() >= self._next_frame:
            self._draw()

    def _draw(self) -> None:
        self._screen.show(self._frame())
        # from the end of drawing, so a slow terminal never takes most of the time
        self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def _frame(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = self._line
        num_done = self._start_step if line is None else line.step
        bar = ProgressBar(total=self._num_steps, completed=num_done)
        rows = [("train", bar, f"{num_done}/{self._num_steps}", "" if line is None else time_left_text(line))]
        if self._num_evaluated is not None:
            rows.append(
                ("evaluate", ProgressBar(total=None, completed=self._num_evaluated), str(self._num_evaluated), "")
            )
        bars = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None, None):  # the bar takes the remaining width
            bars.add_column(ratio=ratio, no_wrap=True)
        for row in rows:
            bars.add_row(*row)
        frame = Table.grid(expand=True)
        frame.add_row(bars)
        if line is not None:
            frame.add_row(Text(metrics_text(line), style="" if math.isfinite(line.loss) else "red"))
        return frame


class _Screen:
    """Where frames replace each other. This base class, for before the start and after the end, draws none."""

    def open(self, frame: Any) -> None:
        pass

    def show(self, frame: Any) -> None:
        pass

    def line(self, text: str, style: str) -> None:
        LineWriter().write(text)

    def close(self, last_frame: Callable[[], Any]) -> None:
        pass


class _TerminalScreen(_Screen):
    """rich's live display. Lines, including those of trimtab's logger, go above the frame."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._console.on_broken_pipe = discard_stdout  # type: ignore[method-assign]  # rich would end the process
        self._is_open = True
        # standard error that goes to a file stays there
        to_console = sys.stderr is not None and sys.stderr.isatty()
        self._live = Live(console=self._console, auto_refresh=False, redirect_stderr=to_console)

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
    """Let log handlers write to `new`: they keep the stream they were made with and would break the live display."""
    if old is not new:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


class _NotebookScreen(_Screen):
    """One output of the cell, updated in place; lines follow below it. Needs no widgets."""

    def open(self, frame: Any) -> None:
        display = importlib.import_module("IPython.display").display
        self._handle: Any = display(frame, display_id=True)

    def show(self, frame: Any) -> None:
        self._handle.update(frame)

    def close(self, last_frame: Callable[[], Any]) -> None:
        self._handle.update(last_frame())
