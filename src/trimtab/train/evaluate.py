"""One pass over held-out data. Sums are kept on the device, never logits, so that evaluation needs no more memory."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from trimtab.engine import Engine
from trimtab.errors import LossError
from trimtab.model.losses import Loss
from trimtab.randomness import host_randomness_kept

OwnMetric = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]


class Metrics(Protocol):
    """Streaming metrics of a task."""

    @property
    def sums(self) -> list[torch.Tensor]:
        """All that is kept, to be added up over processes in place."""

    def update(
        self,
        logits: torch.Tensor,
        batch: dict[str, torch.Tensor],
        loss_sum: torch.Tensor,
        weight: torch.Tensor | int,
        hits: torch.Tensor | None = None,
    ) -> None:
        """Take in one batch; `logits` are empty where the loss made none, and `hits` may tell what they would."""

    def compute(self) -> dict[str, float]:
        """The metrics over everything taken in."""


class Evaluator:
    """Evaluates a model on one loader, as often as asked.

    Args:
        engine: The engine that prepared the loader.
        loader: Batches of held-out data, prepared.
        loss: The loss that training uses.
        make_metrics: Fresh streaming metrics for one pass.
        own_metrics: Functions of (logits, batch) that give one value a row; their mean is reported under their name.
            They need a loss that makes logits.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Iterable[Any],
        loss: Loss,
        make_metrics: Callable[[], Metrics],
        own_metrics: Mapping[str, OwnMetric] | None = None,
    ) -> None:
        self._engine = engine
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
        model = self._engine.unwrap_model(model)  # nothing is exchanged but the sums
        was_training = model.training
        model.eval()
        metrics = self._make_metrics()
        own: dict[str, list[torch.Tensor]] = {name: [] for name in self._own}
        try:
            # a loader draws a number when it begins, which must not move the dropout of the steps that follow
            with host_randomness_kept():
                for num_done, batch in enumerate(self._loader, 1):
                    if self._engine.has_no_rows:
                        continue
                    step = self._loss(model, batch)
                    metrics.update(step.logits, batch, step.loss_sum(), step.weight, step.hits)
                    if self._own and not step.logits.numel():
                        raise _no_logits(self._own)
                    for name, function in self._own.items():
                        own[name].append(_sum_and_count(function(step.logits, batch)))
                    on_batch(num_done)
        finally:
            model.train(was_training)
        own_sums = {name: torch.stack(sums).sum(0).cpu() if sums else torch.zeros(2) for name, sums in own.items()}
        if self._engine.use_distributed:
            for kept in metrics.sums:
                kept.copy_(self._engine.reduce(kept.cpu()))
            own_sums = self._engine.reduce(own_sums)
        return metrics.compute() | {name: _mean(sums) for name, sums in own_sums.items()}


def _no_logits(own: Mapping[str, OwnMetric]) -> LossError:
    return LossError(
        f"{', '.join(own)} need the logits of the model, and this loss makes none",
        "compute the loss of evaluations plainly (memory.loss: plain)",
    )


def _sum_and_count(values: Any) -> torch.Tensor:
    values = torch.as_tensor(values).detach().float().reshape(-1)
    return torch.stack([values.sum(), torch.full_like(values[:1], len(values)).sum()])


def _mean(sum_and_count: torch.Tensor) -> float:
    total, count = sum_and_count.tolist()
    return float(total / count) if count else float("nan")
