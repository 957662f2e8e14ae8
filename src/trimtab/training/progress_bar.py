"""Progress as a bar, in a terminal or a notebook."""

import atexit
import math
import time
from typing import Any

from trimtab.training.progress_lines import LineWriter, Progress
from trimtab.training.progress_text import StepLine, evaluation_text, metrics_text, time_left_text
from trimtab.training.screen import SECONDS_BETWEEN_FRAMES, Screen, build_screen, table_of_bars


class BarProgress(Progress):
    """A bar with the metrics below it; evaluations and notes are lines above it.

    Frames are drawn inside the calls, not by a thread, which would take time from the training loop.
    """

    def __init__(self) -> None:
        self._screen = Screen()
        self._start_step = 0
        self._line: StepLine | None = None
        self._num_evaluated: int | None = None
        self._next_frame = 0.0

    def start(self, num_steps: int, start_step: int = 0) -> None:
        """Open the bar."""
        self.close()
        super().start(num_steps)
        self._start_step = start_step
        self._line = self._num_evaluated = None
        self._screen = build_screen()
        self._screen.open(self._frame())
        atexit.register(self.close)  # restores the cursor of the terminal if the process dies
        self._next_frame = time.monotonic() + SECONDS_BETWEEN_FRAMES

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
        self.close()
        LineWriter().write(summary)

    def close(self) -> None:
        """Draw the last frame and close the bar."""
        self._num_evaluated = None
        self._screen.close(self._frame)
        self._screen = Screen()
        atexit.unregister(self.close)

    def _draw_if_old(self) -> None:
        if time.monotonic() >= self._next_frame:
            self._draw()

    def _draw(self) -> None:
        self._screen.show(self._frame())
        # measured from the end of drawing, so that a slow terminal never takes most of the time
        self._next_frame = time.monotonic() + SECONDS_BETWEEN_FRAMES

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
        frame = Table.grid(expand=True)
        frame.add_row(table_of_bars(rows))
        if line is not None:
            frame.add_row(Text(metrics_text(line), style="" if math.isfinite(line.loss) else "red"))
        return frame
