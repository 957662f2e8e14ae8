"""Keeps a run within its memory: looks ahead before step 1, takes a step back that ran out, and cuts batches smaller.

The batches that the optimizer sees, their rows and their weights stay what they are: only how many rows go through the
model at once becomes less, and stays so for the rest of the run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import MemoryCap, is_out_of_memory, peak_memory, peak_reserved
from trimtab.log import say
from trimtab.model.losses import Loss
from trimtab.optim.preallocation import preallocate_state
from trimtab.training.evaluate import Evaluator
from trimtab.training.rehearsal import Peak, Preflight
from trimtab.training.rollback import OutOfMemory, Transaction
from trimtab.units import format_bytes

T = TypeVar("T")

_CURES = (
    "a larger memory.budget, memory.gradient_checkpointing: all, memory.loss: chunked, a smaller data.max_length, "
    "or adapter: lora"
)


class Hold:
    """What a run does about its memory.

    Args:
        engine: The engine that prepared everything below.
        model: The prepared model.
        optimizer: The prepared optimizer.
        loss: The loss of training.
        batches: The prepared loader of micro-batches.
        evaluator: Held-out data, or None where there is none.
        released_later: Parameters that begin to train during the run.
        max_grad_norm: As in training.
        cap: What the run is held to.
        looks_ahead: Whether worst batches are run before the first step.
        predicted_peak_bytes: What the plan predicted of the figure that `peak_memory` measures; None without a plan.
    """

    def __init__(
        self,
        engine: Engine,
        model: torch.nn.Module,
        optimizer: Any,
        loss: Loss,
        batches: Any,
        *,
        evaluator: Evaluator | None,
        released_later: list[torch.nn.Parameter],
        max_grad_norm: float | None,
        cap: MemoryCap,
        looks_ahead: bool,
        predicted_peak_bytes: int | None,
    ) -> None:
        self._engine, self._optimizer, self._evaluator = engine, optimizer, evaluator
        self._sampler = batches.batch_sampler
        self._planned = self._sampler.micro_batch_size
        self._transaction = Transaction(engine, model)
        self._preflight = Preflight(engine, model, loss, batches, self._transaction, released_later, max_grad_norm)
        self._looks_ahead, self._predicted = looks_ahead, predicted_peak_bytes
        self._foreseen: Peak | None = None  # by the look ahead
        self._foreseen_evaluation = Peak(0, 0)
        self.cap = cap

    # ------------------------------------------------------------------ before the first step

    def look_ahead(self, tell: Callable[[str], None]) -> None:
        """Give the optimizer its state, and run the worst batches of the data; smaller pieces where they do not fit.

        Args:
            tell: Shows the user a line.

        Raises:
            DoesNotFit: Not even one row fits.
        """
        self._preallocate()
        if not self._looks_ahead:
            return
        with self._engine.busy("trying the largest batches"):
            found = self._preflight.train()
            while isinstance(found, OutOfMemory):
                tell(self._shrink(found, "before the first step"))
                found = self._preflight.train()
            self._foreseen_evaluation = self._look_at_evaluation()
            self._foreseen = found | self._foreseen_evaluation
        tell(f"the largest batches need {self._in_words(self._foreseen)}")

    def _preallocate(self) -> None:
        held = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        try:
            preallocate_state(self._optimizer.optimizer, held)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise DoesNotFit(
                f"the model and the state of its optimizer alone need more memory than there is\n"
                f"  cure: train.optimizer: adamw8bit, {_CURES}"
            ) from error

    def _look_at_evaluation(self) -> Peak:
        evaluator = self._evaluator
        if evaluator is None:
            return Peak(0, 0)
        found = self._preflight.evaluate(evaluator)
        while isinstance(found, OutOfMemory):
            evaluator.halve(evaluator.num_rows or evaluator.loader.batch_sampler.micro_batch_size)
            found = self._preflight.evaluate(evaluator)
        return found

    # ------------------------------------------------------------------ during the run

    def attempt(self, work: Callable[[], T], step: int) -> T | str:
        """Compute the gradients of a step.

        Args:
            work: Does that.
            step: The number of the step.

        Returns:
            What `work` gives; or, where memory ran out, a line that says so. Then all is as before the step, but for
            the size of the micro-batches, which the loader has to be asked for again.

        Raises:
            DoesNotFit: It was one row, or other processes have gone on already.
        """
        result = self._transaction.attempt(work, together=self._engine.use_distributed)
        return self._shrink(result, f"at step {step}") if isinstance(result, OutOfMemory) else result

    def _shrink(self, failure: OutOfMemory, where: str) -> str:
        """From now on half as many rows at once."""
        sampler, num_processes = self._sampler, self._engine.num_processes
        before = min(sampler.micro_batch_size, sampler.batch_size, len(sampler.lengths))
        after = -(-before // 2)
        if failure.is_too_late:
            rows = max(1, after // num_processes)
            raise DoesNotFit(
                f"{failure} {where} on process {self._engine.process_index}, too late for the other processes to take "
                f"the step back\n  cure: go on with memory.micro_batch: {rows}"
            )
        if before <= num_processes:
            has_plan = self._predicted is not None or not self.cap.budget_bytes
            tried = "" if has_plan else " (no plan was made, so nothing but smaller micro-batches was tried)"
            raise DoesNotFit(f"{failure} {where} with one row at once{tried}\n  cure: {_CURES}")
        sampler.recut(after)
        shown = [str(-(-rows // num_processes)) for rows in (before, after)]
        return f"{failure} {where}: micro-batches of {' → '.join(shown)}"

    @property
    def micro_batch_size(self) -> int:
        """Rows that go through the model at once, over all processes."""
        return int(self._sampler.micro_batch_size)

    # ------------------------------------------------------------------ the end, and going on

    def measured(self) -> dict[str, int]:
        """Peaks of the run, beside what was foretold and foreseen."""
        device = self._engine.device
        numbers = {"peak_memory_bytes": peak_memory(device), "peak_reserved_bytes": peak_reserved(device)}
        if self._predicted is not None:
            numbers["predicted_peak_bytes"] = self._predicted
        if self._foreseen is not None:
            numbers["preflight_peak_bytes"] = self._foreseen.allocated_bytes
            if self._evaluator is not None:
                numbers["preflight_eval_peak_bytes"] = self._foreseen_evaluation.allocated_bytes
        return numbers

    def last_words(self) -> str:
        """What the run needed, in a line; nothing where it was neither foretold nor foreseen."""
        if self._predicted is None and self._foreseen is None:
            return ""
        device = self._engine.device
        return f"memory: {self._in_words(Peak(peak_memory(device), peak_reserved(device)))}"

    def _in_words(self, peak: Peak) -> str:
        words = format_bytes(peak.allocated_bytes)
        if peak.reserved_bytes != peak.allocated_bytes:
            words += f" ({format_bytes(peak.reserved_bytes)} reserved)"
        if self._predicted:
            difference = peak.allocated_bytes / self._predicted - 1
            words += f"; predicted {format_bytes(self._predicted)}, so {difference:+.1%}"
        if self.cap.budget_bytes:
            words += f"; the budget is {format_bytes(self.cap.budget_bytes)}"
        return words

    def state_dict(self) -> dict[str, Any]:
        """How small micro-batches and evaluations have become, and what was planned then."""
        return {
            "planned": self._planned,
            "micro_batch": self._sampler.micro_batch_size,
            "evaluation": None if self._evaluator is None else self._evaluator.num_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what had become smaller, if the same was planned; nothing becomes larger by going on or back."""
        if state["planned"] != self._planned:
            return
        if state["micro_batch"] < self._sampler.micro_batch_size:
            say(f"memory had run out before: {state['micro_batch']} rows at once, not {self._planned}")
            self._sampler.recut(state["micro_batch"])
        if self._evaluator is not None and state["evaluation"] is not None:
            self._evaluator.num_rows = min(state["evaluation"], self._evaluator.num_rows or state["evaluation"])
