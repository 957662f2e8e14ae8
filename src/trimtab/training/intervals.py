"""When something is due again: by steps, by epochs, or by time spent on training."""

import math
from typing import Any

from trimtab.units import Every


class Due:
    """Tells at each step whether it is time.

    Evaluations and saves themselves do not count as time, else a long one would be due again at once.

    Args:
        every: How often; None is never.
        steps_per_epoch: Steps of an epoch.
    """

    def __init__(self, every: Every | None, steps_per_epoch: int) -> None:
        self._seconds = every.seconds if every is not None else None
        self._steps: float | None = None
        if every is not None:
            self._steps = every.steps or (every.epochs * steps_per_epoch if every.epochs else None)
        self._last_step, self._last_s = 0, 0.0

    def now(self, step: int, train_seconds: float) -> bool:
        """Whether it is due after `step`."""
        if self._steps is not None:
            # the first step at or after each multiple, which may fall between steps: half of an epoch of 5
            done, before = (math.floor(count / self._steps + 1e-9) for count in (step, self._last_step))
            return done > before
        return self._seconds is not None and train_seconds - self._last_s >= self._seconds

    def done(self, step: int, train_seconds: float) -> None:
        """It was done: the time until the next one begins."""
        self._last_step, self._last_s = step, train_seconds

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {"last_step": self._last_step, "last_s": self._last_s}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._last_step, self._last_s = state["last_step"], state["last_s"]
