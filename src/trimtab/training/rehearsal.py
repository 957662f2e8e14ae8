"""Run the largest batches of the data before step 1 to measure how much memory they need.

Afterwards, weights, gradients, buffers, random numbers and the position in the data are unchanged.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.engine.placement import to_device
from trimtab.hardware.memory import peak_memory, peak_reserved, reset_peak_memory
from trimtab.model.captured_step import compute_uncaptured
from trimtab.techniques.base import Trial
from trimtab.training.evaluate import Evaluator
from trimtab.training.rollback import OutOfMemory, Rollback
from trimtab.training.step import window_gradients
from trimtab.training.trainer_parts import TrainingParts


@dataclass(frozen=True)
class Peak:
    """The largest memory use at one time."""

    allocated_bytes: int
    reserved_bytes: int

    def __or__(self, other: "Peak") -> "Peak":
        """Return the maximum of both."""
        return Peak(max(self.allocated_bytes, other.allocated_bytes), max(self.reserved_bytes, other.reserved_bytes))


class Rehearsal:
    """Measure the peak memory of the largest batches.

    Args:
        parts: The parts that compute a step; the model is in training mode.
        rollback: Undoes the work.
        released_later: Parameters that are unfrozen during the run, which then needs the most memory.
        max_grad_norm: The norm to which training clips gradients.
    """

    def __init__(
        self,
        parts: TrainingParts,
        rollback: Rollback,
        released_later: Iterable[torch.nn.Parameter],
        max_grad_norm: float | None,
    ) -> None:
        self._engine, self._model, self._loss, self._batches = parts.engine, parts.model, parts.loss, parts.batches
        self._rollback = rollback
        self._released_later = list(released_later)
        self._max_grad_norm = max_grad_norm

    def train(self) -> Peak | OutOfMemory:
        """Run forward and backward of the largest micro-batch, as the second of its window if there are several."""
        sampler = self._batches.batch_sampler
        num_rows = min(sampler.batch_size, len(sampler.lengths))
        # during a second micro-batch, the gradients of the first one are in memory too
        num_micro_batches = 1 if sampler.micro_batch_size >= num_rows else 2

        def work() -> None:
            self._compute(worst_batch(self._batches, self._engine), num_micro_batches)

        required_grad = [parameter.requires_grad for parameter in self._released_later]
        try:
            for parameter in self._released_later:
                parameter.requires_grad_(True)
            return self._measure(work)
        finally:
            for parameter, requires_grad in zip(self._released_later, required_grad, strict=True):
                parameter.requires_grad_(requires_grad)

    def find_trials(self, compute_gradients: Callable[..., Any]) -> list[Trial]:
        """Return the largest micro-batch of the run, then one of each other size in the current epoch, largest first.

        The first one does not depend on the epoch, so its compiled code is the same in a resumed run.

        Args:
            compute_gradients: The function of the training steps: `window_gradients`, wrapped by techniques.
        """
        sampler = self._batches.batch_sampler
        # one of several micro-batches adds to the gradients; a single one writes them
        num_micro_batches = min(2, max(sampler.window_sizes(), default=1))
        counts: Counter[tuple[int, int]] = Counter()
        rows_of: dict[tuple[int, int], list[int]] = {}
        for rows in sampler:
            shape = sampler.shape_of(rows)
            counts[shape] += 1
            rows_of.setdefault(shape, rows)
        largest = sampler.largest_micro_batch(_label_lengths(self._batches.dataset))
        num_rows, num_tokens = sampler.shape_of(largest)
        largest_shape = num_rows, max(num_tokens, sampler.max_tokens or 0)
        shapes = sorted(counts.keys() - {largest_shape}, key=lambda shape: (math.prod(shape), shape), reverse=True)
        runs = {
            shape: partial(self._try, partial(batch_of, rows=rows), compute_gradients, num_micro_batches)
            for shape, rows in rows_of.items()
        }
        runs[largest_shape] = partial(self._try, worst_batch, compute_gradients, num_micro_batches)
        return [Trial(shape, counts[shape] / counts.total(), runs[shape]) for shape in (largest_shape, *shapes)]

    def _try(
        self,
        make_batch: Callable[..., dict[str, torch.Tensor]],
        compute_gradients: Callable[..., Any],
        num_micro_batches: int,
    ) -> None:
        """Run the first micro-batch of a window and undo it.

        If it runs out of memory, so will its step, which is then retried.
        """
        engine, model, loss = self._engine, self._model, self._loss

        def work() -> None:
            batch = make_batch(self._batches, engine=engine)
            if engine.use_distributed:
                self._compute(batch, 1)
            else:
                compute_gradients(engine, model, loss, [batch], num_micro_batches, self._max_grad_norm)

        self._rollback.rehearse(work)

    def _compute(self, batch: dict[str, torch.Tensor], num_times: int) -> None:
        engine, model, loss = self._engine, self._model, self._loss
        if engine.use_distributed:  # without communication: one process may run out of memory while the others do not
            for _ in range(num_times):
                loss(engine.unwrap_model(model), batch).value.backward()  # type: ignore[no-untyped-call]
            return
        batches = [batch] * num_times
        window_gradients(engine, model, loss, batches, num_times, self._max_grad_norm, compute=compute_uncaptured)

    def evaluate(self, evaluator: Evaluator) -> Peak | OutOfMemory:
        """Run the largest evaluation batch, in micro-batches of the evaluator's current size."""
        return self._measure(lambda: evaluator.try_batch(self._model, worst_batch(evaluator.loader, self._engine)))

    def _measure(self, work: Callable[[], None]) -> Peak | OutOfMemory:
        device = self._engine.device
        reset_peak_memory(device)
        outcome: None | OutOfMemory = self._rollback.rehearse(work)
        if self._engine.use_distributed:  # a failure of one process counts for all
            failed = torch.tensor(int(outcome is not None), dtype=torch.int32)
            if bool(self._engine.reduce(failed)):
                outcome = outcome or OutOfMemory()
        return Peak(peak_memory(device), peak_reserved(device)) if outcome is None else outcome


def worst_batch(loader: Any, engine: Engine) -> dict[str, torch.Tensor]:
    """Return this process's share of a loader's largest batch, on the device; the loader's position does not change."""
    sampler = loader.batch_sampler
    rows = sampler.largest_micro_batch(_label_lengths(loader.dataset))
    # packed rows with filler up to the limit: another epoch may fill a micro-batch completely
    return batch_of(loader, rows, engine, num_tokens=sampler.max_tokens)


def batch_of(loader: Any, rows: list[int], engine: Engine, num_tokens: int | None = None) -> dict[str, torch.Tensor]:
    """Return the largest share of a process in a batch, on the device; the loader's position does not change.

    Args:
        loader: The prepared loader.
        rows: The rows of all processes.
        engine: The engine that prepared it.
        num_tokens: Tokens of a packed batch, including filler; None counts the tokens of the rows.
    """
    options = {} if num_tokens is None else {"num_tokens": num_tokens}
    examples = [loader.dataset[row] for row in loader.batch_sampler.largest_share(rows)]
    batch = loader.collate_fn(examples, **options)
    return to_device(batch, engine.device)  # type: ignore[no-any-return]


def _label_lengths(dataset: Any) -> list[int] | None:
    """Return the lengths of labels that are padded separately; None if they match the inputs' or have no length."""
    if isinstance(dataset, torch.utils.data.Subset):
        lengths = _label_lengths(dataset.dataset)
        return None if lengths is None else [lengths[row] for row in dataset.indices]
    offsets = dataset.offsets.get("labels")
    if offsets is None or offsets is dataset.offsets["input_ids"]:
        return None
    return [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
