"""One pass over held-out data. Sums are kept on the device, never logits, so that evaluation needs no more memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from trimtab.model.losses import Loss
from trimtab.randomness import host_randomness_kept

OwnMetric = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]


class Metrics(Protocol):
    """Streaming metrics of a task."""

    def update(
        self, logits: torch.Tensor, batch: dict[str, torch.Tensor], loss_sum: torch.Tensor, weight: torch.Tensor | int
    ) -> None:
        """Take in one batch."""

    def compute(self) -> dict[str, float]:
        """The metrics over everything taken in."""


class Evaluator:
    """Evaluates a model on one loader, as often as asked.

    Args:
        loader: Batches of held-out data, prepared.
        loss: The loss that training uses.
        make_metrics: Fresh streaming metrics for one pass.
        own_metrics: Functions of (logits, batch) that give one value a row; their mean is reported under their name.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        loss: Loss,
        make_metrics: Callable[[], Metrics],
        own_metrics: Mapping[str, OwnMetric] | None = None,
    ) -> None:
        self._loader = loader
        self._loss = loss
        self._make_metrics = make_metrics
        self._own = dict(own_metrics or {})

    @torch.no_grad()
    def run(self, model: torch.nn.Module, on_batch: Callable[[int], None] = lambda num_done: None) -> dict[str, float]:
        """The metrics of `model`, which is left in the mode it was in; so are the random numbers of the training.

        Args:
            model: The model to measure.
            on_batch: Called with the number of batches done, for a progress bar.
        """
        was_training = model.training
        model.eval()
        metrics = self._make_metrics()
        own: dict[str, list[torch.Tensor]] = {name: [] for name in self._own}
        try:
            # a loader draws a number when it begins, which must not move the dropout of the steps that follow
            with host_randomness_kept():
                for num_done, batch in enumerate(self._loader, 1):
                    step = self._loss(model, batch)
                    metrics.update(step.logits, batch, step.loss_sum(), step.weight)
                    for name, function in self._own.items():
                        own[name].append(_sum_and_count(function(step.logits, batch)))
                    on_batch(num_done)
        finally:
            model.train(was_training)
        return metrics.compute() | {name: _mean(sums) for name, sums in own.items() if sums}


def _sum_and_count(values: Any) -> torch.Tensor:
    values = torch.as_tensor(values).detach().float().reshape(-1)
    return torch.stack([values.sum(), torch.full_like(values[:1], len(values)).sum()])


def _mean(sums_and_counts: list[torch.Tensor]) -> float:
    total, count = torch.stack(sums_and_counts).sum(0).tolist()
    return float(total / count) if count else float("nan")
