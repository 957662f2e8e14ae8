"""Before step 1: the worst batches of the data are run through the model for nothing but their need of memory.

Everything is as it was afterwards: weights, gradients, statistics, random numbers, the place in the data.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.hardware.memory import peak_memory, peak_reserved, reset_peak_memory
from trimtab.model.losses import Loss
from trimtab.training.evaluate import Evaluator
from trimtab.training.rollback import OutOfMemory, Transaction
from trimtab.training.step import window_gradients


@dataclass(frozen=True)
class Peak:
    """The most memory that was in use at once."""

    allocated_bytes: int
    reserved_bytes: int

    def __or__(self, other: "Peak") -> "Peak":
        """The larger of both."""
        return Peak(max(self.allocated_bytes, other.allocated_bytes), max(self.reserved_bytes, other.reserved_bytes))


class Preflight:
    """Runs worst batches.

    Args:
        engine: The engine that prepared model and loaders.
        model: The prepared model, in training mode.
        loss: The loss of training.
        batches: The prepared loader of training.
        transaction: Takes everything back.
        released_later: Parameters that are frozen now and begin to train during the run: then it needs the most.
        max_grad_norm: As in training.
    """

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        loss: Loss,
        batches: Any,
        transaction: Transaction,
        released_later: Iterable[torch.nn.Parameter] = (),
        max_grad_norm: float | None = None,
    ) -> None:
        self._engine, self._model, self._loss, self._batches = engine, model, loss, batches
        self._transaction = transaction
        self._released_later = list(released_later)
        self._max_grad_norm = max_grad_norm

    def train(self) -> Peak | OutOfMemory:
        """The worst training micro-batch, forward and backward; as the second of its window, if there is one."""
        engine = self._engine
        sampler = self._batches.batch_sampler
        num_rows = min(sampler.batch_size, len(sampler.lengths))
        # the gradients of a first micro-batch are there while the second one computes
        num_micro_batches = 1 if sampler.micro_batch_size >= num_rows else 2

        def work() -> None:
            batch = worst_batch(self._batches, engine)
            if engine.use_distributed:  # nothing may be exchanged: one process may run out of memory, the others not
                for _ in range(num_micro_batches):
                    self._loss(engine.unwrap_model(self._model), batch).value.backward()  # type: ignore[no-untyped-call]
                return
            window_gradients(
                engine, self._model, self._loss, [batch] * num_micro_batches, num_micro_batches, self._max_grad_norm
            )

        trained = [parameter.requires_grad for parameter in self._released_later]
        try:
            for parameter in self._released_later:
                parameter.requires_grad_(True)
            return self._measured(lambda: self._transaction.rehearse(work))
        finally:
            for parameter, trains in zip(self._released_later, trained, strict=True):
                parameter.requires_grad_(trains)

    def evaluate(self, evaluator: Evaluator) -> Peak | OutOfMemory:
        """The worst evaluation batch, in pieces of the size that evaluations have now."""

        def work() -> None:
            evaluator.try_batch(self._model, worst_batch(evaluator.loader, self._engine))

        return self._measured(lambda: self._transaction.rehearse(work))

    def _measured(self, rehearse: Any) -> Peak | OutOfMemory:
        device = self._engine.device
        reset_peak_memory(device)
        outcome: None | OutOfMemory = rehearse()
        if self._engine.use_distributed:  # all of them go on together, or none does
            failed = torch.tensor(int(outcome is not None), dtype=torch.int32)
            if bool(self._engine.reduce(failed)):
                outcome = outcome or OutOfMemory()
        return Peak(peak_memory(device), peak_reserved(device)) if outcome is None else outcome


def worst_batch(loader: Any, engine: Engine) -> dict[str, torch.Tensor]:
    """The worst batch of a prepared loader on the device, as this process's share; its place in the data stays."""
    dataset = loader.dataset
    rows = loader.batch_sampler.worst_rows(_label_lengths(dataset))
    own = -(-len(rows) // engine.num_processes)
    batch: dict[str, torch.Tensor] = loader.collate_fn([dataset[row] for row in rows[:own]])
    return to_device(batch, engine.device)  # type: ignore[no-any-return]


def _label_lengths(dataset: Any) -> list[int] | None:
    """The lengths of labels that are padded on their own; None where they are as long as the inputs, or no lists."""
    if isinstance(dataset, torch.utils.data.Subset):
        lengths = _label_lengths(dataset.dataset)
        return None if lengths is None else [lengths[row] for row in dataset.indices]
    at = dataset.offsets.get("labels")
    if at is None or at is dataset.offsets["input_ids"]:
        return None
    return [end - start for start, end in zip(at, at[1:], strict=False)]
