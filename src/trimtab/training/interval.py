"""Intervals between evaluations or saves: in steps, in epochs, or in training time."""

import math
from typing import Any

from trimtab.units import Every


class Interval:
    """Decide after each step whether an interval has passed.

    The caller passes training time, which excludes evaluations and saves: otherwise a long evaluation would end its own
    interval immediately.

    Args:
        every: The length; None means that the interval never passes.
        steps_per_epoch: Optimizer steps of an epoch.
    """

    def __init__(self, every: Every | None, steps_per_epoch: int) -> None:
        self._seconds = every.seconds if every is not None else None
        self._steps: float | None = None
        if every is not None:
            self._steps = every.steps or (every.epochs * steps_per_epoch if every.epochs else None)
        self._last_step, self._last_s = 0, 0.0

    def has_passed(self, step: int, train_seconds: float) -> bool:
        """Whether the interval has passed since `restart`."""
        if self._steps is not None:
            # the first step at or after each multiple, which need not be a whole number: half an epoch of 5 steps
            done, before = (math.floor(count / self._steps + 1e-9) for count in (step, self._last_step))
            return done > before
        return self._seconds is not None and train_seconds - self._last_s >= self._seconds

    def restart(self, step: int, train_seconds: float) -> None:
        """Begin the next interval."""
        self._last_step, self._last_s = step, train_seconds

    def state_dict(self) -> dict[str, Any]:
        """Return the start of the current interval."""
        return {"last_step": self._last_step, "last_s": self._last_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the start of the current interval."""
        self._last_step, self._last_s = state["last_step"], state["last_s"]
