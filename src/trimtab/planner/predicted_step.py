"""Answers to a plan's questions about one step: its memory, its limit, its time. Cached answers avoid a trace."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cached_property
from typing import Any

from trimtab.hardware.memory import expected_non_allocator_memory
from trimtab.log import log_info_once
from trimtab.planner.host import TracedTensors
from trimtab.planner.memory import Prediction
from trimtab.planner.prediction_cache import Answers
from trimtab.planner.step_timing import StepTiming
from trimtab.planner.target import Target


class PredictedStep:
    """The memory and time of one step on a target.

    Args:
        predict: Traces the step and predicts its memory; called at most once, and only for unknown answers.
        answers: Known answers about the step on this kind of target.
        target: The device and its budget.
        with_kernels: Whether Triton or bitsandbytes kernels are loaded.
    """

    def __init__(
        self, predict: Callable[[], Prediction], answers: Answers, target: Target, *, with_kernels: bool
    ) -> None:
        self._predict, self._answers = predict, answers
        self._expandable = target.expandable
        usual = expected_non_allocator_memory(with_kernels)
        self.outside = usual if target.outside_bytes is None else target.outside_bytes

    @cached_property
    def prediction(self) -> Prediction:
        """The prediction, with its trace."""
        return self._predict()

    @cached_property
    def _memory(self) -> dict[str, Any]:
        def ask() -> dict[str, Any]:
            found = self.prediction
            return {
                "allocated": found.allocated,
                "parts": dict(found.parts),
                "stage": found.stage,
                "remarks": list(found.trace.remarks),
            }

        memory: dict[str, Any] = self._answers.get("memory", ask)
        for remark in memory["remarks"]:
            log_info_once(remark)
        return memory

    @property
    def allocated(self) -> int:
        """As in `Prediction`."""
        return int(self._memory["allocated"])

    @property
    def parts(self) -> Mapping[str, int]:
        """As in `Prediction`."""
        parts: Mapping[str, int] = self._memory["parts"]
        return parts

    @property
    def stage(self) -> str:
        """As in `Prediction`."""
        return str(self._memory["stage"])

    @property
    def needed(self) -> int:
        """The smallest allocator limit under which the step runs."""
        return int(self._answers.get("needed", lambda: self.prediction.needed))

    @property
    def total(self) -> int:
        """As in `Prediction`."""
        return self.needed + self.outside

    def fits(self, budget: int) -> bool:
        """Whether the step runs within a budget in bytes."""
        room = budget - self.outside
        if self._expandable and room < self.allocated:  # as in `Prediction.fits`: nothing needs to be replayed
            return False
        return bool(self._answers.get(f"runs under {room}", lambda: self.prediction.fits(budget)))

    def seconds(self, timing: StepTiming) -> float:
        """Seconds of an optimizer step."""
        return float(self._answers.get(f"seconds of {timing}", lambda: timing.seconds(self.prediction.trace)))

    @cached_property
    def tensors(self) -> TracedTensors:
        """The sizes that determine the use of the host."""
        return TracedTensors(**self._answers.get("tensors", lambda: asdict(TracedTensors.of(self.prediction.trace))))
