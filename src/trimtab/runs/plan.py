"""What will be run: every choice that was left open in the recipe, decided before the first step."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from trimtab.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Outlook:
    """What was predicted of a plan; see `Plan`."""

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_total_bytes: int
    predicted_step_s: float
    predicted_parts: Mapping[str, int]
    eval_micro_batch: int | None = None
    predicted_eval_peak_bytes: int | None = None
    predicted_host_bytes: int | None = None
    predicted_disk_bytes: int | None = None


@dataclass(frozen=True)
class Plan:
    """The decisions of one run; written to `plan.json`.

    What begins with `predicted` is None where nothing had to be predicted: on a CPU without a budget.

    Attributes:
        budget_bytes: What may be used of the device.
        predicted_peak_bytes: The peak of what tensors take, as the allocator counts it.
        predicted_total_bytes: What the device needs for that.
        predicted_step_s: Seconds of an optimizer step.
        predicted_parts: The peak by anatomy.
        eval_micro_batch: Held-out rows that one process has at once, at most; None is not decided here.
        predicted_eval_peak_bytes: The peak of evaluations; where it is the highest it is that of the whole run.
        predicted_host_bytes: Memory of the host, at most: while loading, or while a state is saved.
        predicted_disk_bytes: Of the disk, at most: checkpoints and the best model.
    """

    device: str
    precision: str
    batch_size: int
    micro_batch_size: int  # rows that one process has at once
    num_processes: int
    num_steps: int
    steps_per_epoch: int
    warmup_steps: int
    num_train_rows: int
    num_eval_rows: int
    num_parameters: int
    num_trainable: int
    max_length: int
    padding_share: float
    metric: str
    optimizer: str = "adamw"
    adapter: str = "none"
    gradient_checkpointing: str = "none"
    loss: str = "plain"
    kernels: str = "plain"
    offload: str = "none"
    budget_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    predicted_total_bytes: int | None = None
    predicted_step_s: float | None = None
    predicted_parts: Mapping[str, int] = field(default_factory=dict)
    eval_micro_batch: int | None = None
    predicted_eval_peak_bytes: int | None = None
    predicted_host_bytes: int | None = None
    predicted_disk_bytes: int | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A plan that was written; what this version does not know is left out."""
        known = {own.name for own in fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    @property
    def rows_at_once(self) -> int:
        """Rows of a micro-batch over all processes."""
        return min(self.micro_batch_size * self.num_processes, self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def describe(self) -> list[str]:
        """What a user wants to know before it starts, a line each."""
        trainable = f"{_millions(self.num_trainable)} of {_millions(self.num_parameters)} parameters train"
        cut = "" if self.micro_batch_size >= self.batch_size else f" in micro-batches of {self.micro_batch_size}"
        where = self.device if self.num_processes == 1 else f"{self.num_processes} processes ({self.device} here)"
        return [
            f"{where}, {self.precision}, {self.optimizer}; {trainable}",
            *self._levers(),
            *self._prediction(),
            f"{self.num_train_rows:,} rows to train on, {self.num_eval_rows:,} held out; length ≤ {self.max_length}, "
            f"{self.padding_share:.1%} padding",
            f"{self.num_steps:,} steps of {self.batch_size} rows{cut} ({self.steps_per_epoch:,} an epoch), "
            f"warmup {self.warmup_steps:,}; best by {self.metric}",
        ]

    def _levers(self) -> list[str]:
        """What is done to need less memory, if anything is."""
        said = [
            (self.adapter != "none", f"adapter {self.adapter}"),
            (self.gradient_checkpointing != "none", f"gradient checkpointing {self.gradient_checkpointing}"),
            (self.loss != "plain", f"loss {self.loss}"),
            (self.kernels != "plain", f"kernels {self.kernels}"),
            (self.offload != "none", f"{self.offload} in host memory"),
        ]
        words = [text for holds, text in said if holds]
        return ["; ".join(words)] if words else []

    def _prediction(self) -> list[str]:
        """What it will take, if that was predicted."""
        if self.predicted_total_bytes is None or self.budget_bytes is None or self.predicted_step_s is None:
            return []
        return [
            f"predicted: {format_bytes(self.predicted_total_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{format_seconds(self.predicted_step_s)} a step{self.beside()}"
        ]

    def beside(self) -> str:
        """What it takes of the host, if that was predicted."""
        if self.predicted_host_bytes is None or self.predicted_disk_bytes is None:
            return ""
        host, disk = format_bytes(self.predicted_host_bytes), format_bytes(self.predicted_disk_bytes)
        return f"; at most {host} of the host's memory, {disk} of disk"


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
