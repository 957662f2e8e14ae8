"""Keep a run within its memory: rehearse the largest batches before step 1, and retry steps that ran out of memory.

The batches that the optimizer sees, their rows and their weights never change. Only the micro-batch size becomes
smaller, for the rest of the run.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import (
    MemoryCap,
    describe_failed_allocation,
    is_out_of_memory,
    peak_memory,
    peak_reserved,
    release_cached_memory,
)
from trimtab.log import say
from trimtab.model.captured_step import captured_micro_batches_of
from trimtab.optim.in_backward import updates_of
from trimtab.optim.preallocation import preallocate_state
from trimtab.techniques.apply import memory_advice
from trimtab.techniques.base import Trial
from trimtab.training.evaluate import Evaluator
from trimtab.training.failure_picture import FailurePicture, NoPicture
from trimtab.training.rehearsal import Peak, Rehearsal
from trimtab.training.rollback import OutOfMemory, Rollback
from trimtab.training.trainer_parts import TrainingParts
from trimtab.units import format_bytes

T = TypeVar("T")

CURES = ", ".join(["a larger memory.budget", *memory_advice(), "a smaller data.max_length", "or adapter: lora"])


class WeightsChanged(Exception):  # noqa: N818 (an event of a step, which the loop handles)
    """Memory ran out in a step that had already changed weights in backward, so it cannot be undone.

    Args:
        failure: What ran out.
    """

    def __init__(self, failure: OutOfMemory) -> None:
        super().__init__(str(failure))
        self.failure = failure


class MemoryGuard:
    """Make the micro-batches of a run smaller when memory runs out.

    Args:
        parts: The parts that compute a step.
        evaluator: Evaluates on held-out rows; None if there are none.
        released_later: Parameters that are unfrozen during the run.
        max_grad_norm: The norm to which training clips gradients.
        cap: The memory limit of the run.
        rehearses: Whether to run the largest batches before step 1.
        predicted_peak_bytes: The prediction of what `peak_memory` measures; None without a plan.
        measured_peak_bytes: The peak that trial steps measured, instead of a prediction.
        picture: Draws the memory of a step that ran out of memory.
    """

    def __init__(
        self,
        parts: TrainingParts,
        *,
        evaluator: Evaluator | None,
        released_later: list[torch.nn.Parameter],
        max_grad_norm: float | None,
        cap: MemoryCap,
        rehearses: bool,
        predicted_peak_bytes: int | None,
        measured_peak_bytes: int | None = None,
        picture: FailurePicture | None = None,
    ) -> None:
        self._engine, self._optimizer, self._evaluator = parts.engine, parts.optimizer, evaluator
        self._model = parts.model
        self._sampler = parts.batches.batch_sampler
        self._planned = self._sampler.micro_batch_size
        self._picture: FailurePicture = picture or NoPicture()
        self._has_drawn = False
        self._rollback = Rollback(parts.engine, parts.model, self._capture)
        self._rehearsal = Rehearsal(parts, self._rollback, released_later, max_grad_norm)
        self._rehearses, self._predicted, self._measured = rehearses, predicted_peak_bytes, measured_peak_bytes
        self._rehearsed: Peak | None = None  # the peaks of training and evaluation
        self._rehearsed_evaluation = Peak(0, 0)
        self.cap = cap

    # ------------------------------------------------------------------ before the first step

    def rehearse(self, tell: Callable[[str], None]) -> None:
        """Allocate the optimizer state and run the largest batches, in smaller micro-batches until they fit.

        Args:
            tell: Shows a line to the user.

        Raises:
            DoesNotFit: A micro-batch of one row does not fit.
        """
        self._preallocate()
        if not self._rehearses:
            return
        with self._engine.busy("trying the largest batches"):
            found = self._rehearsal.train()
            while isinstance(found, OutOfMemory):
                tell(self.shrink(found, "before the first step", draws=False))
                found = self._rehearsal.train()
            self._rehearsed_evaluation = self._rehearse_evaluation()
            self._rehearsed = found | self._rehearsed_evaluation
        tell(f"the largest batches need {self._describe(self._rehearsed)}")

    def _preallocate(self) -> None:
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        try:
            preallocate_state(self._optimizer.optimizer, parameters)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            drawn = self.draw_now(error, "before the first step")
            raise DoesNotFit(
                "the model and its optimizer state alone do not fit into memory\n"
                f"  cure: train.optimizer: adamw8bit, {CURES}{drawn}"
            ) from error

    def _rehearse_evaluation(self) -> Peak:
        evaluator = self._evaluator
        if evaluator is None:
            return Peak(0, 0)
        found = self._rehearsal.evaluate(evaluator)
        while isinstance(found, OutOfMemory):
            evaluator.halve(evaluator.num_rows or evaluator.loader.batch_sampler.micro_batch_size)
            found = self._rehearsal.evaluate(evaluator)
        return found

    def find_trials(self, compute_gradients: Callable[..., Any]) -> list[Trial]:
        """Return one micro-batch of every size, largest first, to run with the function of the training steps."""
        return self._rehearsal.find_trials(compute_gradients)

    # ------------------------------------------------------------------ during the run

    def attempt(self, work: Callable[[], T], step: int) -> T | str:
        """Compute the gradients of a step, and undo it if memory runs out.

        Args:
            work: Computes the gradients.
            step: The number of the step, for messages.

        Returns:
            The result of `work`; or, if memory ran out, a line that reports it. In that case everything except the
            micro-batch size is restored to its state before the step, and the caller has to request the rows from the
            loader again.

        Raises:
            DoesNotFit: The micro-batch had one row, or other processes can no longer undo the step.
            WeightsChanged: Weights were updated in backward: the caller has to load a checkpoint and call `shrink`.
        """
        result = self._rollback.attempt(work, together=self._engine.use_distributed)
        if not isinstance(result, OutOfMemory):
            return result
        if result.has_changed_weights:
            raise WeightsChanged(result)
        return self.shrink(result, f"at step {step}")

    def shrink(self, failure: OutOfMemory, where: str, *, draws: bool = True) -> str:
        """Halve the micro-batch size; return a line that reports it.

        Args:
            failure: What ran out.
            where: A text that says when it happened.
            draws: Whether to draw the memory of the failed step, if it is the first of the run.

        Raises:
            DoesNotFit: The micro-batch cannot be smaller.
        """
        sampler, num_processes = self._sampler, self._engine.num_processes
        before = min(sampler.micro_batch_size, sampler.batch_size, len(sampler.lengths))
        after = -(-before // 2)
        if failure.is_too_late:
            rows = max(1, after // num_processes)
            raise DoesNotFit(
                f"{failure} {where} on process {self._engine.process_index}, too late for the other processes to undo "
                f"the step\n  cure: resume with memory.micro_batch: {rows}"
            )
        if before <= num_processes:
            has_plan = self._expected is not None or not self.cap.budget_bytes
            tried = "" if has_plan else " (without a plan only smaller micro-batches were tried)"
            drawn = self._draw(failure, where, 1)
            raise DoesNotFit(f"{failure} {where} with a micro-batch size of 1{tried}\n  cure: {CURES}{drawn}")
        obstacle = updates_of(self._model).words_against_dividing
        if obstacle:
            drawn = self._draw(failure, where, -(-before // num_processes))
            raise DoesNotFit(f"{failure} {where}, and the batch cannot be divided: {obstacle}\n  cure: {CURES}{drawn}")
        sampler.set_micro_batch_size(after)
        captured = captured_micro_batches_of(self._model)
        if captured is not None:  # smaller graphs cannot use the memory of graphs that are too large
            captured.forget()
            release_cached_memory(self._engine.device)
        shown = [str(-(-rows // num_processes)) for rows in (before, after)]
        words = f"micro-batch size {' → '.join(shown)}{updates_of(self._model).words_if_divided}"
        drawn = self._draw(failure, where, -(-before // num_processes)) if draws and not self._has_drawn else ""
        return f"{failure} {where}: {words}{drawn}"

    def draw_now(self, error: Exception, where: str) -> str:
        """Draw what is in memory while an error that ends the run is handled; return a text for its message."""
        self._capture()
        rows = min(self._sampler.micro_batch_size, self._sampler.batch_size, len(self._sampler.lengths))
        return self._draw(OutOfMemory(describe_failed_allocation(error)), where, -(-rows // self._engine.num_processes))

    def _capture(self) -> None:
        self._picture.capture(self._model, self._optimizer)

    def _draw(self, failure: OutOfMemory, where: str, micro_batch: int) -> str:
        """Draw the memory of a failed step in this process; return a text for the message."""
        if failure.is_elsewhere:
            return ""
        self._has_drawn = True
        with self._engine.busy("drawing the memory of the failed step"):
            path = self._picture.write(f"{failure} {where}", micro_batch)
        return f"\n  picture: {path}" if path else ""

    @property
    def micro_batch_size(self) -> int:
        """The micro-batch size, summed over all processes."""
        return int(self._sampler.micro_batch_size)

    # ------------------------------------------------------------------ the end, and resuming

    def measured(self) -> dict[str, int]:
        """Return the measured peaks of the run, with the predicted and the rehearsed ones."""
        device = self._engine.device
        numbers = {"peak_memory_bytes": peak_memory(device), "peak_reserved_bytes": peak_reserved(device)}
        if self._predicted is not None:
            numbers["predicted_peak_bytes"] = self._predicted
        if self._measured is not None:
            numbers["measured_peak_bytes"] = self._measured
        if self._rehearsed is not None:
            numbers["preflight_peak_bytes"] = self._rehearsed.allocated_bytes
            if self._evaluator is not None:
                numbers["preflight_eval_peak_bytes"] = self._rehearsed_evaluation.allocated_bytes
        return numbers

    def summary(self) -> str:
        """Describe the peak of the run in one line; empty if it was neither predicted nor rehearsed."""
        if self._expected is None and self._rehearsed is None:
            return ""
        device = self._engine.device
        return f"memory: {self._describe(Peak(peak_memory(device), peak_reserved(device)))}"

    @property
    def _expected(self) -> int | None:
        return self._measured if self._predicted is None else self._predicted

    def _describe(self, peak: Peak) -> str:
        text = format_bytes(peak.allocated_bytes)
        if peak.reserved_bytes != peak.allocated_bytes:
            text += f" ({format_bytes(peak.reserved_bytes)} reserved)"
        if self._expected:
            difference, word = peak.allocated_bytes / self._expected - 1, "predicted" if self._predicted else "measured"
            text += f"; {word} {format_bytes(self._expected)} ({difference:+.1%})"
        if self.cap.budget_bytes:
            text += f"; budget {format_bytes(self.cap.budget_bytes)}"
        return text

    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batch sizes of training and evaluation, and the planned one."""
        return {
            "planned": self._planned,
            "micro_batch": self._sampler.micro_batch_size,
            "evaluation": None if self._evaluator is None else self._evaluator.num_rows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore smaller micro-batch sizes if the planned one is the same; a size never becomes larger."""
        if state["planned"] != self._planned:
            return
        if state["micro_batch"] < self._sampler.micro_batch_size:
            say(f"memory ran out earlier: micro-batch size {state['micro_batch']} instead of {self._planned}")
            self._sampler.set_micro_batch_size(state["micro_batch"])
        if self._evaluator is not None and state["evaluation"] is not None:
            self._evaluator.num_rows = min(state["evaluation"], self._evaluator.num_rows or state["evaluation"])
