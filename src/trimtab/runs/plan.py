"""The plan of a run: every choice that the recipe left open, decided before the first step; written to plan.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from trimtab.runs.outlook import AnyOutlook, outlook_as_dict, read_outlook
from trimtab.techniques.apply import describe, values_in_plan
from trimtab.techniques.base import StepSpec
from trimtab.techniques.optimizer_state import OptimizerState


@dataclass(frozen=True)
class Plan:
    """The decisions of one run.

    The values of techniques are attributes as well, by their keys: `plan.loss`. So are those of the prediction,
    such as `plan.predicted_peak_bytes`; these are None where nothing was predicted: on a CPU without a budget, and for
    a model whose step cannot be traced.

    Attributes:
        device: Where this process trains.
        spec: How a step is made.
        texts: The value of each technique, as plan.json has it.
        micro_batch_tokens: The most tokens of a packed micro-batch of one process; None if batches are divided by rows.
        outlook: The prediction, or what trial steps measured.
    """

    device: str
    spec: StepSpec
    texts: Mapping[str, str]
    batch_size: int
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
    micro_batch_tokens: int | None = None
    outlook: AnyOutlook | None = field(default=None)

    def __getattr__(self, name: str) -> Any:
        # only called for names that are not fields
        texts: Mapping[str, str] = self.__dict__.get("texts", {})
        if name in texts:
            return texts[name]
        outlook = outlook_as_dict(self.__dict__.get("outlook"))
        if name in outlook:
            return outlook[name]
        raise AttributeError(f"a plan has no attribute {name!r}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """A plan from plan.json, also one that an older version wrote; unknown keys are left out."""
        techniques = values_in_plan(values)
        spec = StepSpec.of(values["micro_batch_size"], values["precision"], techniques)
        known = {own.name for own in fields(cls)} - {"spec", "texts", "outlook"}
        return cls(
            spec=spec,
            texts={key: str(values.get(key, value)) for key, value in techniques.items()},
            outlook=read_outlook(values),
            **{name: value for name, value in values.items() if name in known},
        )

    @property
    def precision(self) -> str:
        """The precision that the run computes in."""
        return self.spec.precision

    @property
    def micro_batch_size(self) -> int:
        """Rows of one process in one forward."""
        return self.spec.micro_batch

    @property
    def global_micro_batch(self) -> int:
        """Rows of a micro-batch over all processes."""
        return min(self.micro_batch_size * self.num_processes, self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        own = {name: value for name, value in vars(self).items() if name not in ("spec", "texts", "outlook")}
        device, batch_size = own.pop("device"), own.pop("batch_size")
        return {
            "device": device,
            "precision": self.precision,
            "batch_size": batch_size,
            "micro_batch_size": self.micro_batch_size,
            **own,
            **self.texts,
            **outlook_as_dict(self.outlook),
        }

    def describe(self) -> list[str]:
        """The summary that is logged before a run starts, as lines."""
        trainable = f"{_millions(self.num_trainable)} of {_millions(self.num_parameters)} parameters are trainable"
        size = f"{self.micro_batch_tokens:,} tokens" if self.micro_batch_tokens else str(self.micro_batch_size)
        cut = "" if self.micro_batch_size >= self.batch_size else f" in micro-batches of {size}"
        where = (
            self.device if self.num_processes == 1 else f"{self.num_processes} processes (this one on {self.device})"
        )
        techniques = "; ".join(describe(self.spec, {OptimizerState.key: self.spec[OptimizerState.key]}))
        return [
            f"{where}, {self.precision}, {self.spec[OptimizerState.key]}; {trainable}",
            *([f"techniques: {techniques}"] if techniques else []),
            *([] if self.outlook is None else [self.outlook.words()]),
            f"{self.num_train_rows:,} training rows, {self.num_eval_rows:,} held-out rows; length ≤ {self.max_length}, "
            f"{self.padding_share:.1%} padding",
            f"{self.num_steps:,} steps of {self.batch_size} rows{cut} ({self.steps_per_epoch:,} per epoch), "
            f"warmup {self.warmup_steps:,}; best model by {self.metric}",
        ]


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
