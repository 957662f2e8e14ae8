"""What will be run: every choice that was left open in the recipe, decided before the first step."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Plan:
    """The decisions of one run; written to `plan.json`."""

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


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
