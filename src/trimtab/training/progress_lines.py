"""Progress as lines on standard output: text, JSON, or none."""

import contextlib
import json
import math
import os
import sys
from dataclasses import asdict
from typing import Any

from trimtab.checkpoint.disk_errors import is_disk_full
from trimtab.log import for_stream
from trimtab.training.progress_text import StepLine, evaluation_text, step_text


class LineWriter:
    """Write lines to standard output and flush each one. A closed pipe ends the output, not the run."""

    def __init__(self) -> None:
        self._is_open = True

    def write(self, text: str) -> None:
        """Write a line."""
        if not self._is_open or sys.stdout is None:
            return
        try:
            text = for_stream(text, sys.stdout)
            try:
                sys.stdout.write(text + "\n")
            except UnicodeEncodeError:
                encoding = sys.stdout.encoding
                sys.stdout.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            sys.stdout.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            if isinstance(error, OSError) and is_disk_full(error):
                return  # a log on a full disk: the buffer is written when there is space again
            self._is_open = False
            if isinstance(error, BrokenPipeError):
                discard_stdout()


def discard_stdout() -> None:
    """Redirect standard output to null: otherwise Python fails at exit when it flushes the buffer."""
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
    except (OSError, ValueError):
        return


class Progress:
    """Show a run; this base class shows nothing. Calls are cheap: `step` may be called after every step."""

    _num_steps = 0

    def start(self, num_steps: int, start_step: int = 0) -> None:
        """Start the display of a run of `num_steps`, resumed after `start_step`."""
        self._num_steps = num_steps

    def step(self, line: StepLine) -> None:
        """Show the metrics of a step: a line for every call, a bar at most every 0.2 s."""

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Show the metrics of an evaluation; `improved` if its model is the best so far."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def eval_progress(self, num_done: int) -> None:
        """Show how many batches of an evaluation are done."""

    def close(self) -> None:
        """Restore the terminal, without a summary."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """End the run; `failed` if it ended with an error. May be called twice."""


class QuietProgress(Progress):
    """Show only the summary of a run that failed."""

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary to standard error if the run failed."""
        if failed and sys.stderr is not None:
            with contextlib.suppress(OSError):  # a log on a full disk must not hide why the run failed
                sys.stderr.write(summary + "\n")


class PlainProgress(Progress):
    """One line of text per call, for logs and pipes."""

    def __init__(self) -> None:
        self._lines = LineWriter()

    def step(self, line: StepLine) -> None:
        """Write a line."""
        self._lines.write(step_text(line, self._num_steps))

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write a line."""
        self._lines.write(evaluation_text(metrics, step, improved))

    def note(self, text: str) -> None:
        """Write the text."""
        self._lines.write(text)

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary."""
        self._lines.write(summary)


class JsonProgress(Progress):
    """Write one JSON object per call. Numbers that JSON does not have are the strings "nan", "inf" and "-inf"."""

    def __init__(self) -> None:
        self._lines = LineWriter()

    def _write(self, event: str, values: dict[str, Any]) -> None:
        self._lines.write(json.dumps({"event": event, **_json_values(values)}, allow_nan=False, ensure_ascii=False))

    def start(self, num_steps: int, start_step: int = 0) -> None:
        """Write the number of steps."""
        super().start(num_steps, start_step)
        self._write("start", {"description": "train", "num_steps": num_steps, "start_step": start_step})

    def step(self, line: StepLine) -> None:
        """Write all metrics."""
        self._write("step", {**asdict(line), "num_steps": self._num_steps})

    def evaluation(self, metrics: dict[str, float], step: int, improved: bool) -> None:
        """Write the metrics."""
        self._write("evaluation", {"step": step, "metrics": _json_values(metrics), "improved": improved})

    def note(self, text: str) -> None:
        """Write the text."""
        self._write("note", {"text": text})

    def finish(self, summary: str, failed: bool = False) -> None:
        """Write the summary."""
        self._write("finish", {"summary": summary, "failed": failed})


def _json_values(values: dict[str, Any]) -> dict[str, Any]:
    return {
        key: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in values.items()
    }
