"""One pass over held-out data. Sums are kept on the device, never logits, so that evaluation needs no more memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from trimtab.model.losses import Loss

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
        """The metrics of `model`, which is left in the mode it was in.

        Args:
            model: The model to measure.
            on_batch: Called with the number of batches done, for a progress bar.
        """
        was_training = model.training
        model.eval()
        metrics = self._make_metrics()
        own: dict[str, list[torch.Tensor]] = {name: [] for name in self._own}
        try:
            for num_done, batch in enumerate(self._loader, 1):
                step = self._loss(model, batch)
                metrics.update(step.logits, batch, step.loss_sum(), step.weight)
                for name, function in self._own.items():
                    values = torch.as_tensor(function(step.logits, batch)).detach().float().reshape(-1)
                    own[name].append(
                        torch.stack([values.sum(), torch.tensor(float(len(values)), device=values.device)])
                    )
                on_batch(num_done)
        finally:
            model.train(was_training)
        return metrics.compute() | {name: _mean(sums) for name, sums in own.items() if sums}


def _mean(sums_and_counts: list[torch.Tensor]) -> float:
    total, count = torch.stack(sums_and_counts).sum(0).tolist()
    return float(total / count) if count else float("nan")
