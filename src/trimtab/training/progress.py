"""The display of a run: a bar, plain lines, JSON lines, or nothing.

None of them can end a run: if the output is closed, they become silent.
"""

import difflib
import os
import sys

from trimtab.errors import RecipeError
from trimtab.training.progress_bar import BarProgress
from trimtab.training.progress_lines import JsonProgress, PlainProgress, Progress, QuietProgress
from trimtab.training.screen import is_notebook

MODES = ("auto", "bar", "plain", "json", "quiet")


def build_progress(mode: str) -> Progress:
    """Build the display of a run.

    Args:
        mode: "bar", "plain" (a line per call), "json" (an object per call), "quiet" (only the summary of an error),
            or "auto": a bar in a terminal or a notebook, else plain.
    """
    if mode not in MODES:
        near = difflib.get_close_matches(mode.lower(), MODES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"progress={mode!r} is not valid{meant}", f"use one of {', '.join(MODES)}")
    if draws_bars(mode):
        return BarProgress()
    if mode == "json":
        return JsonProgress()
    return QuietProgress() if mode == "quiet" else PlainProgress()


def draws_bars(mode: str) -> bool:
    """Whether progress is shown as bars."""
    return mode == "bar" or (mode == "auto" and (_is_terminal() or is_notebook()))


def _is_terminal() -> bool:
    """Whether standard output is a terminal that can move its cursor and show the characters of the bar."""
    try:
        is_terminal = sys.stdout.isatty()
    except (AttributeError, ValueError):  # no standard output, or a closed one
        return False
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    return is_terminal and os.environ.get("TERM") not in ("dumb", "unknown") and encoding.startswith("utf")
