"""Decisions based on evaluations: which model is the best so far, and whether the run no longer improves."""

import math
from collections.abc import Mapping
from typing import Any

from trimtab.errors import CheckpointError


class Best:
    """The best value of a metric so far, and the first step that reached it."""

    def __init__(self, metric: str, higher_is_better: bool) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.value: float | None = None
        self.step: int | None = None

    def update(self, metrics: Mapping[str, float], step: int) -> bool:
        """Compare the metrics of an evaluation with the best ones.

        Returns:
            Whether they are better; a value that is not finite never is.
        """
        value = float(metrics[self.metric])
        if not _is_better(value, self.value, self.higher_is_better, 0.0):
            return False
        self.value, self.step = value, step
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, its step, and the metric."""
        return {**_criterion(self), "value": self.value, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        _check_criterion(self, state)
        self.value, self.step = state["value"], state["step"]


class EarlyStopping:
    """Stop a run after `patience` consecutive evaluations that did not improve a metric.

    A change must be larger than `min_delta` to count as an improvement.
    """

    def __init__(self, metric: str, higher_is_better: bool, patience: int = 3, min_delta: float = 0.0) -> None:
        self.metric = metric
        self.higher_is_better = higher_is_better
        self.patience = patience
        self.min_delta = min_delta
        self.value: float | None = None
        self.num_without_improvement = 0

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Compare the metrics of an evaluation with the best ones.

        Returns:
            Whether the run should stop. A value that is not finite counts as no improvement.
        """
        value = float(metrics[self.metric])
        if _is_better(value, self.value, self.higher_is_better, self.min_delta):
            self.value, self.num_without_improvement = value, 0
        else:
            self.num_without_improvement += 1
        return self.num_without_improvement >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the number of evaluations since, and the metric."""
        return {**_criterion(self), "value": self.value, "num_without_improvement": self.num_without_improvement}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; `patience` and `min_delta` keep the values of this run."""
        _check_criterion(self, state)
        self.value, self.num_without_improvement = state["value"], state["num_without_improvement"]


def _is_better(value: float, best: float | None, higher_is_better: bool, min_delta: float) -> bool:
    if not math.isfinite(value):
        return False
    if best is None:
        return True
    return (value - best if higher_is_better else best - value) > min_delta


def _criterion(owner: Best | EarlyStopping) -> dict[str, Any]:
    return {"metric": owner.metric, "higher_is_better": owner.higher_is_better}


def _check_criterion(owner: Best | EarlyStopping, state: dict[str, Any]) -> None:
    """Refuse the state of a different metric: its values cannot be compared."""
    here = _criterion(owner)
    saved = {key: state[key] for key in here}
    if saved != here:
        raise CheckpointError(
            f"the checkpoint selects the best model by {_describe(saved)}, this run by {_describe(here)}",
            f"resume with evaluate.metric: {saved['metric']}, or start a new run from the model",
        )


def _describe(criterion: dict[str, Any]) -> str:
    return f"{'the highest' if criterion['higher_is_better'] else 'the lowest'} {criterion['metric']}"
