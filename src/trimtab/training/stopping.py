"""What evaluations decide: which model is the best so far, and when a run has stopped getting better."""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from trimtab.errors import CheckpointError, RecipeError


class Best:
    """The best value of a metric so far, and the step that reached it. The first of equal values stays.

    Args:
        metric: Name of the metric.
        higher_is_better: False for losses and errors.
    """

    def __init__(self, metric: str, higher_is_better: bool) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Take the metrics of an evaluation.

        Returns:
            Whether they are the best so far; a value that is not finite never is.
        """
        value = _value_of(self.metric, metrics)
        if not _is_better(value, self.value, self.higher_is_better, 0.0):
            return False
        self.value, self.step = value, step
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {**_what_counts(self), "value": self.value, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        _check_same(self, state)
        self.value, self.step = state["value"], state["step"]


class EarlyStopping:
    """Stops a run after `patience` evaluations in a row that did not improve a metric.

    Args:
        metric: Name of the metric.
        higher_is_better: False for losses and errors.
        patience: Evaluations without improvement that end the run.
        min_delta: A change must be larger than this to count as an improvement.
    """

    def __init__(self, metric: str, higher_is_better: bool, patience: int = 3, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise RecipeError(f"early_stopping.patience={patience} is not possible", "a whole number from 1 up")
        if not 0.0 <= min_delta < math.inf:
            raise RecipeError(f"early_stopping.min_delta={min_delta} is not possible", "a number from 0 up")
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.patience = patience
        self.min_delta = min_delta
        self.value: float | None = None
        self.num_without_improvement = 0

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Take the metrics of an evaluation.

        Returns:
            Whether the run should stop. A value that is not finite counts as no improvement.
        """
        value = _value_of(self.metric, metrics)
        if _is_better(value, self.value, self.higher_is_better, self.min_delta):
            self.value, self.num_without_improvement = value, 0
        else:
            self.num_without_improvement += 1
        return self.num_without_improvement >= self.patience

    @property
    def reason(self) -> str:
        """Why the run stops, in words for the user."""
        count = f"{self.num_without_improvement} evaluation{'s' if self.num_without_improvement != 1 else ''}"
        if self.value is None:
            return f"{self.metric} was not a finite number in {count}"
        return f"{self.metric} did not improve on {self.value:.4g} in {count}"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run has to know."""
        return {**_what_counts(self), "value": self.value, "num_without_improvement": self.num_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave; patience and min_delta stay as they are now."""
        _check_same(self, state)
        self.value, self.num_without_improvement = state["value"], state["num_without_improvement"]


def _is_better(value: float, best: float | None, higher_is_better: bool, min_delta: float) -> bool:
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return (value - best if higher_is_better else best - value) > min_delta


def _value_of(metric: str, metrics: Mapping[str, float]) -> float:
    if metric in metrics:
        return float(metrics[metric])
    near = difflib.get_close_matches(metric, metrics, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise RecipeError(
        f"the evaluation gives no metric {metric!r}{meant}",
        f"set evaluate.metric or early_stopping.metric to one of {', '.join(sorted(metrics)) or 'its metrics'}",
    )


def _what_counts(owner: Best | EarlyStopping) -> dict[str, Any]:
    return {"metric": owner.metric, "higher_is_better": owner.higher_is_better}


def _check_same(owner: Best | EarlyStopping, state: dict[str, Any]) -> None:
    """A best value of one metric says nothing about another."""
    here = _what_counts(owner)
    saved = {key: state[key] for key in here}
    if saved != here:
        raise CheckpointError(
            f"the checkpoint's best value is of {_in_words(saved)}, this run looks for {_in_words(here)}",
            f"go on with evaluate.metric: {saved['metric']}, or start a new run from the model",
        )


def _in_words(counted: dict[str, Any]) -> str:
    return f"{'the highest' if counted['higher_is_better'] else 'the lowest'} {counted['metric']}"
