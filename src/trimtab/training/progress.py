"""What the user sees during a run: a bar, plain lines, JSON lines, or nothing.

Every way takes the same calls. None of them can end a run: where the output goes away, they fall silent.
"""

import atexit
import contextlib
import difflib
import importlib
import json
import logging
import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from trimtab.checkpoint.disk_errors import is_no_room
from trimtab.errors import RecipeError
from trimtab.log import logger
from trimtab.units import format_bytes, format_seconds

MODES = ("auto", "bar", "plain", "json", "quiet")

_SECONDS_BETWEEN_FRAMES = 0.2  # drawing takes one to two milliseconds, so this keeps it under one hundredth of the time


@dataclass(frozen=True, slots=True)
class StepLine:
    """The numbers of a run after an optimizer step."""

    step: int
    epoch: float
    loss: float
    lr: float
    grad_norm: float | None
    tokens_per_s: float
    memory_bytes: int
    memory_share: float | None
    num_skipped: int
    seconds_left: float | None


class Progress(Protocol):
    """Shows a run. Calls are cheap: `step` may be called after every step."""

    def start(self, num_steps: int | None, start_step: int = 0, description: str = "train") -> None:
        """A run of `num_steps` (None if not known) begins, or goes on after `start_step`."""

    def step(self, line: StepLine) -> None:
        """Numbers after a step. Lines are written for every call, a bar is drawn when it is time."""

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """An evaluation is done; `improved` says that its model is the best so far."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def eval_progress(self, done: int, total: int | None) -> None:
        """An evaluation has done so many batches."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """The run is over; `failed` says that it ended with an error. Safe to call twice."""


def build_progress(mode: str) -> Progress:
    """Make what shows a run.

    Args:
        mode: "bar", "plain" (a line for each call), "json" (an object for each call), "quiet" (only an error's
            summary), or "auto": a bar in a terminal or a notebook, else plain.

    Returns:
        The way to show it.
    """
    if mode not in MODES:
        near = difflib.get_close_matches(mode.lower(), MODES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"progress={mode!r} is not known{meant}", f"one of {', '.join(MODES)}")
    if mode == "bar" or (mode == "auto" and (_in_terminal() or _in_notebook())):
        return BarProgress()
    if mode == "json":
        return JsonProgress()
    return QuietProgress() if mode == "quiet" else PlainProgress()


def _in_terminal() -> bool:
    """A terminal that can move its cursor and show the characters of the bar."""
    try:
        is_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # no standard output at all, or a closed one
        return False
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    return is_terminal and os.environ.get("TERM") not in ("dumb", "unknown") and encoding.startswith("utf")


def _in_notebook() -> bool:
    if "IPython" not in sys.modules:
        return False
    from rich.console import Console

    return Console().is_jupyter


# ---------------------------------------------------------------------- words


def step_words(line: StepLine, num_steps: int | None) -> str:
    """The one format of a step: what is not known is left out, and a loss that is no number is shown as such."""
    total = "" if num_steps is None else f"/{num_steps}"
    return " · ".join(filter(None, [f"step {line.step}{total}", *_numbers(line), _left(line)]))


def _numbers(line: StepLine) -> list[str]:
    memory = format_bytes(line.memory_bytes)
    if line.memory_share is not None:
        memory += f" ({line.memory_share:.0%})"
    norm = [] if line.grad_norm is None else [f"norm {_short(line.grad_norm)}"]
    return [
        f"epoch {line.epoch:.2f}",
        f"loss {_exact(line.loss)}",
        f"lr {line.lr:.1e}" if line.lr else "lr 0",
        *norm,
        f"{line.tokens_per_s:,.0f} tokens/s",
        memory,
        f"skipped {line.num_skipped}",
    ]


def _left(line: StepLine) -> str:
    """Time left, no more exact than an estimate can be; empty where it is not known."""
    seconds = line.seconds_left
    if seconds is None or not math.isfinite(seconds):
        return ""
    return f"{format_seconds(round(seconds) if seconds < 60 else 60 * round(seconds / 60))} left"


def evaluation_words(metrics: dict[str, float], step: int, improved: bool) -> str:
    """One line for an evaluation."""
    values = [f"{name} {_exact(value)}" for name, value in metrics.items()]
    return " · ".join([f"evaluation at step {step}", *values, *(["best so far"] if improved else [])])


def _exact(value: float) -> str:
    """Three digits after the point, or as many as a small number takes; nan and inf as they are."""
    return f"{value:.3f}" if not math.isfinite(value) or value == 0 or abs(value) >= 0.01 else f"{value:.2e}"


def _short(value: float) -> str:
    return f"{value:#.2g}" if abs(value) < 10 else f"{value:,.0f}"


# ---------------------------------------------------------------------- lines


class _Lines:
    """Writes lines to standard output, at once, and survives a pipe that nobody reads any more."""

    def __init__(self) -> None:
        self._is_open = True

    def write(self, text: str) -> None:
        if not self._is_open or sys.stdout is None:
            return
        try:
            try:
                sys.stdout.write(text + "\n")
            except UnicodeEncodeError:
                encoding = sys.stdout.encoding
                sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and is_no_room(error):
                return  # a log on a full disk: what is buffered is written when there is room again
            self._is_open = False
            if isinstance(error, BrokenPipeError):
                _let_go_of_stdout()


def _let_go_of_stdout() -> None:
    """Send what is still buffered nowhere, else Python fails once more when it flushes at exit, with an exit code."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        return


class PlainProgress:
    """One line of text for each call, for logs and pipes."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._num_steps: int | None = None

    def start(self, num_steps: int | None, start_step: int = 0, description: str = "train") -> None:
        """Remember how long the run is."""
        self._num_steps = num_steps

    def step(self, line: StepLine) -> None:
        """Write a line."""
        self._lines.write(step_words(line, self._num_steps))

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write a line."""
        self._lines.write(evaluation_words(metrics, step, improved))

    def note(self, text: str) -> None:
        """Write the text."""
        self._lines.write(text)

    def eval_progress(self, done: int, total: int | None) -> None:
        """Nothing: the result is what counts."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary."""
        self._lines.write(summary)


class JsonProgress:
    """One JSON object for each call. Numbers that JSON does not have are the words "nan", "inf" and "-inf"."""

    def __init__(self) -> None:
        self._lines = _Lines()
        self._num_steps: int | None = None

    def _write(self, event: str, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"event": event, **_json_values(values)}, allow_nan=False, ensure_ascii=False))

    def start(self, num_steps: int | None, start_step: int = 0, description: str = "train") -> None:
        """Write what begins."""
        self._num_steps = num_steps
        self._write("start", {"description": description, "num_steps": num_steps, "start_step": start_step})

    def step(self, line: StepLine) -> None:
        """Write all numbers."""
        self._write("step", {**asdict(line), "num_steps": self._num_steps})

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write the metrics."""
        self._write("evaluation", {"step": step, "metrics": _json_values(metrics), "improved": improved})

    def note(self, text: str) -> None:
        """Write the text."""
        self._write("note", {"text": text})

    def eval_progress(self, done: int, total: int | None) -> None:
        """Nothing: the result is what counts."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary."""
        self._write("finish", {"summary": summary, "failed": failed})


def _json_values(values: dict[str, Any]) -> dict[str, Any]:
    is_strange = {key for key, value in values.items() if isinstance(value, float) and not math.isfinite(value)}
    return {key: str(value) if key in is_strange else value for key, value in values.items()}


class QuietProgress:
    """Nothing, but for the summary of a run that failed."""

    def start(self, num_steps: int | None, start_step: int = 0, description: str = "train") -> None:
        """Nothing."""

    def step(self, line: StepLine) -> None:
        """Nothing."""

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def eval_progress(self, done: int, total: int | None) -> None:
        """Nothing."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary to standard error if the run failed."""
        if failed and sys.stderr is not None:
            with contextlib.suppress(OSError):  # why it failed is the news, not that a log has no room
                sys.stderr.write(summary + "\n")


# ---------------------------------------------------------------------- the bar


class BarProgress:
    """A bar with the numbers below it; evaluations and notes stay as lines.

    Drawn from the calls themselves and not by a thread, which would take time from the training loop.
    """

    def __init__(self) -> None:
        self._screen: _Screen = _NoScreen()
        self._num_steps: int | None = None
        self._start_step = 0
        self._description = "train"
        self._line: StepLine | None = None
        self._evaluated: tuple[int, int | None] | None = None
        self._next_frame = 0.0

    def start(self, num_steps: int | None, start_step: int = 0, description: str = "train") -> None:
        """Open the bar."""
        self._close()
        self._num_steps, self._start_step, self._description = num_steps, start_step, description
        self._line = self._evaluated = None
        self._screen = _NotebookScreen() if _in_notebook() else _TerminalScreen()
        self._screen.open(self._frame())
        atexit.register(self._close)  # a run that dies must not leave the terminal without its cursor
        self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def step(self, line: StepLine) -> None:
        """Take the numbers, and draw if it is time."""
        self._line = line
        if time.monotonic() >= self._next_frame:
            self._draw()

    def eval_progress(self, done: int, total: int | None) -> None:
        """Take the count, and draw if it is time."""
        self._evaluated = (done, total)
        if time.monotonic() >= self._next_frame:
            self._draw()

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write a line; the bar of the evaluation goes away."""
        self._evaluated = None
        self._screen.line(evaluation_words(metrics, step, improved), "green" if improved else "")
        self._draw()

    def note(self, text: str) -> None:
        """Write a line."""
        self._screen.line(text, "")

    def finish(self, summary: str, failed: bool = False) -> None:
        """Draw the last frame, close the bar and write the summary below it."""
        self._close()
        _Lines().write(summary)

    def _close(self) -> None:
        self._evaluated = None
        self._screen.close(self._frame)
        self._screen = _NoScreen()
        atexit.unregister(self._close)

    def _draw(self) -> None:
        self._screen.show(self._frame())
        # counted from the end, so that a slow terminal never takes the larger share of the time
        self._next_frame = time.monotonic() + _SECONDS_BETWEEN_FRAMES

    def _frame(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = self._line
        done = self._start_step if line is None else line.step
        rows = [(self._description, done, self._num_steps, "" if line is None else _left(line))]
        if self._evaluated is not None:
            rows.append(("evaluate", *self._evaluated, ""))
        bars = Table.grid(expand=True, padding=(0, 1))
        for ratio in (None, 1, None, None):  # the bar takes the width that is left
            bars.add_column(ratio=ratio, no_wrap=True)
        for name, count, total, rest in rows:
            counted = str(count) if total is None else f"{count}/{total}"
            bars.add_row(name, ProgressBar(total=total, completed=count), counted, rest)
        frame = Table.grid(expand=True)
        frame.add_row(bars)
        if line is not None:
            frame.add_row(Text(" · ".join(_numbers(line)), style="" if math.isfinite(line.loss) else "red"))
        return frame


class _Screen(Protocol):
    """A place where a frame can be drawn again and again."""

    def open(self, frame: Any) -> None: ...

    def show(self, frame: Any) -> None: ...

    def line(self, text: str, style: str) -> None: ...

    def close(self, last_frame: Any) -> None: ...


class _NoScreen:
    """Before the start and after the end: lines are plain."""

    def open(self, frame: Any) -> None:
        pass

    def show(self, frame: Any) -> None:
        pass

    def line(self, text: str, style: str) -> None:
        _Lines().write(text)

    def close(self, last_frame: Any) -> None:
        pass


class _TerminalScreen:
    """rich's live display. Lines go above the frame, those of trimtab's logger too."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False, markup=False, emoji=False)
        self._console.on_broken_pipe = _let_go_of_stdout  # type: ignore[method-assign]  # rich would end the process
        self._is_open = True
        # redirected errors stay where the user sent them
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

    def close(self, last_frame: Any) -> None:
        self._live.update(last_frame())
        self._guarded(self._live.stop)
        _move_handlers(self._redirected, self._stderr)

    def _guarded(self, draw: Any) -> None:
        """A terminal that was closed must not end the run."""
        if not self._is_open:
            return
        try:
            draw()
        except (OSError, ValueError):
            self._is_open = False
            with contextlib.suppress(OSError, ValueError):
                self._live.stop()  # gives standard output back, though it cannot draw


def _move_handlers(old: Any, new: Any) -> None:
    """A log handler holds the stream of its first day; lines written around the live display would tear it."""
    if old is not new:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                handler.setStream(new)


class _NotebookScreen:
    """One output of the cell that is updated in place; lines follow below it. Needs no widgets."""

    def open(self, frame: Any) -> None:
        display = importlib.import_module("IPython.display").display
        self._handle: Any = display(frame, display_id=True)

    def show(self, frame: Any) -> None:
        self._handle.update(frame)

    def line(self, text: str, style: str) -> None:
        _Lines().write(text)

    def close(self, last_frame: Any) -> None:
        self._handle.update(last_frame())
