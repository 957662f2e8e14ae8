"""Evaluation on held-out rows. Only sums stay on the device, never logits, so memory does not grow with the rows.

If memory runs out, batches are split in half from then on; no row is counted twice.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.data.batching import split_batch
from trimtab.data.metrics import Metrics
from trimtab.data.packing import count_rows
from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit, LossError, RecipeError
from trimtab.hardware.memory import is_out_of_memory, release_cached_memory
from trimtab.log import say
from trimtab.model.losses import Loss, StepLoss
from trimtab.randomness import preserve_host_random_state
from trimtab.training.row_outcomes import RowOutcomes

OwnMetric = Callable[[torch.Tensor, Mapping[str, torch.Tensor]], torch.Tensor]

_METRIC_CURE = (
    "return one value per row, such as (logits.argmax(-1) == batch['labels']).float(); their mean is reported"
)


class Evaluator:
    """Evaluates a model on one loader.

    Args:
        engine: The engine that prepared the loader.
        loader: The prepared loader of held-out rows.
        loss: Computes the loss of a batch.
        make_metrics: Returns new streaming metrics for one pass.
        own_metrics: The user's functions of (logits, batch) that return one value per row; their mean is reported under
            the function's name. They need a loss that computes logits.
        make_outcomes: Returns the collector of each row's outcome for one pass; by default nothing is collected.

    Attributes:
        outcomes: The table of `RowOutcomes.finish` of the last pass.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Any,
        loss: Loss,
        make_metrics: Callable[[], Metrics],
        own_metrics: Mapping[str, OwnMetric] | None = None,
        make_outcomes: Callable[[], RowOutcomes] = RowOutcomes,
    ) -> None:
        self._engine = engine
        self.loader = loader
        self._loss = loss
        self._make_metrics = make_metrics
        self._own = dict(own_metrics or {})
        self._make_outcomes = make_outcomes
        self.outcomes: torch.Tensor | None = None
        self.num_rows: int | None = None  # the largest micro-batch size; None: whole batches

    @torch.no_grad()
    def run(self, model: torch.nn.Module, on_batch: Callable[[int], None] = lambda num_done: None) -> dict[str, float]:
        """Return the metrics of `model`. Its mode and the random number generators do not change.

        Args:
            model: The model to evaluate.
            on_batch: Called with the number of batches done, for a progress bar.
        """
        sums = None
        with self._evaluating(model) as inner:
            while sums is None:
                sums = self._pass(inner, on_batch)
        own_sums = {name: torch.stack(own).sum(0).cpu() if own else torch.zeros(2) for name, own in sums.own.items()}
        if self._engine.use_distributed:
            sums.metrics.combine(self._engine.reduce, self._engine.gather)
            own_sums = self._engine.reduce(own_sums)
            self.outcomes = sums.rows.finish(self._engine.gather)
        else:
            self.outcomes = sums.rows.finish()
        return sums.metrics.compute() | {name: _mean(own) for name, own in own_sums.items()}

    @torch.no_grad()
    def try_batch(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
        """Evaluate one batch and discard the result, to find out whether memory is sufficient."""
        with self._evaluating(model) as inner:
            sums = self._new_sums()
            for piece in self._pieces(batch):
                sums.add(self._loss(inner, piece), piece)

    @contextmanager
    def _evaluating(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        model = self._engine.unwrap_model(model)  # processes exchange only sums
        was_training = model.training
        model.eval()
        try:
            # a loader draws a random number when an iteration starts, which must not change the dropout of later steps
            with preserve_host_random_state():
                yield model
        finally:
            model.train(was_training)

    def _new_sums(self) -> "_Sums":
        return _Sums(self._make_metrics(), self._own, self._make_outcomes())

    def _pass(self, model: torch.nn.Module, on_batch: Callable[[int], None]) -> "_Sums | None":
        """Return the sums over all batches; None if memory ran out while adding a batch, which makes them invalid."""
        sums = self._new_sums()
        for num_done, batch in enumerate(self.loader, 1):
            if self._engine.has_no_rows:
                continue
            left = self._pieces(batch)
            while left:
                added = sums.num_added
                try:
                    sums.add(self._loss(model, left[0]), left[0])
                except Exception as error:
                    if not is_out_of_memory(error):
                        raise
                else:
                    del left[0]
                    continue
                # not in the except block, whose traceback keeps tensors alive
                self.halve(count_rows(left[0]))
                if sums.num_added > added:
                    return None
                left = [smaller for piece in left for smaller in self._pieces(piece)]
            sums.rows.add_numbers(getattr(self.loader, "shard", None))
            on_batch(num_done)
        return sums

    def _pieces(self, batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [batch] if self.num_rows is None else split_batch(batch, self.num_rows)

    def halve(self, num_rows: int) -> None:
        """Limit the micro-batch size to half of `num_rows`, which ran out of memory.

        Raises:
            DoesNotFit: The batch had one row, or cannot be split.
        """
        release_cached_memory(self._engine.device)
        if num_rows == 1 or (self.num_rows is not None and num_rows > self.num_rows):
            raise DoesNotFit(
                f"out of memory in an evaluation of {'one row' if num_rows == 1 else 'a batch that cannot be split'}\n"
                "  cure: a larger memory.budget, a smaller data.max_length, or no evaluation (data.eval_share: 0)"
            )
        self.num_rows = (num_rows + 1) // 2
        say(f"out of memory in an evaluation: micro-batch size {num_rows} → {self.num_rows}")


class _Sums:
    """The metrics of a pass, with the sums of the user's own metrics and the outcome of each row."""

    def __init__(self, metrics: Metrics, functions: Mapping[str, OwnMetric], rows: RowOutcomes) -> None:
        self.metrics, self.rows = metrics, rows
        self.own: dict[str, list[torch.Tensor]] = {name: [] for name in functions}
        self._functions = functions
        self.num_added = 0  # batches, including a partially added one

    def add(self, step: StepLoss, batch: dict[str, torch.Tensor]) -> None:
        """Add a batch."""
        if self._functions and not step.logits.numel():
            raise _no_logits(self._functions)
        self.num_added += 1
        self.metrics.update(step.logits, batch, step.item_loss_sum(), step.weight, step.hits)
        self.rows.add(step.logits, batch.get("labels"))
        for name, function in self._functions.items():
            self.own[name].append(_sum_and_count(name, function(step.logits, batch), count_rows(batch)))


def _no_logits(own: Mapping[str, OwnMetric]) -> LossError:
    return LossError(
        f"{', '.join(own)} need the logits of the model, but this loss computes none",
        "memory.loss: plain",
    )


def _sum_and_count(name: str, values: Any, num_rows: int) -> torch.Tensor:
    """Return the sum of the values of a batch, and their number.

    Raises:
        RecipeError: There is not one number per row: a mean of means over batches of different sizes would be wrong.
    """
    try:
        values = torch.as_tensor(values).detach().float().reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        found = f"metrics: {name} returned {type(values).__name__}, expected one number per row"
        raise RecipeError(found, _METRIC_CURE) from error
    if len(values) != num_rows:
        found = "1 value" if len(values) == 1 else f"{len(values)} values"
        raise RecipeError(f"metrics: {name} returned {found} for {num_rows} rows", _METRIC_CURE)
    return torch.stack([values.sum(), torch.full_like(values[:1], len(values)).sum()])


def _mean(sum_and_count: torch.Tensor) -> float:
    total, count = sum_and_count.tolist()
    return float(total / count) if count else float("nan")
