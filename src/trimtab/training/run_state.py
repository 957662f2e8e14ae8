"""The progress of a run, as callbacks see it, and the result of a finished run."""

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class RunState:
    """The progress of a run. Callbacks read it and may set `should_stop`."""

    num_steps: int
    steps_per_epoch: int
    model: torch.nn.Module
    optimizer: Any
    step: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    stop_reason: str = "finished"
    interruption: str | None = None  # a signal or the time limit: the run can be resumed
    _should_stop: bool = False

    @property
    def should_stop(self) -> bool:
        """Whether the run ends after this step. It cannot be set back to False: another callback may have set it."""
        return self._should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._should_stop = self._should_stop or bool(value)

    def interrupt(self, reason: str) -> None:
        """Stop the run before its last step; it can be resumed later."""
        self.should_stop = True
        self.stop_reason = self.interruption = reason

    @property
    def epoch(self) -> float:
        """Epochs done, as a fraction."""
        return self.step / self.steps_per_epoch

    @property
    def is_over(self) -> bool:
        """Whether no more steps are taken."""
        return self.should_stop or self.step >= self.num_steps


@dataclass(frozen=True)
class FitResult:
    """The end of a run: how it ended, and its measurements.

    Attributes:
        step: Optimizer steps done.
        metrics: The metrics of the last evaluation.
        best_metric: The best value of the metric that selects the best model; None without an evaluation.
        best_step: The step of the best model.
        stop_reason: Why the run ended.
        train_seconds: Training time, without evaluations and saves.
        num_tokens: Tokens trained on, by all processes.
        num_skipped: Optimizer steps that were skipped.
        peak_memory_bytes: Peak memory in use.
        interruption: The signal or time limit that ended the run, which can be resumed; None if nothing did.
        save_failure: Why there is no checkpoint of the last step; None if there is one.
        micro_batch_size: Micro-batch size at the end, summed over all processes.
        seconds_left: What is left of `train.max_time`; None without a limit.
    """

    step: int
    metrics: dict[str, float]
    best_metric: float | None
    best_step: int | None
    stop_reason: str
    train_seconds: float
    num_tokens: int
    num_skipped: int
    peak_memory_bytes: int
    interruption: str | None = None
    save_failure: str | None = None
    micro_batch_size: int | None = None
    seconds_left: float | None = None

    def summary(self) -> dict[str, Any]:
        """Return the values of the result that `run.json` stores."""
        names = ("step", "train_seconds", "num_tokens", "num_skipped", "peak_memory_bytes")
        return {name: getattr(self, name) for name in names} | {"stop_reason": self.interruption or self.stop_reason}
