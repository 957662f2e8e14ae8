"""The plan of a run: all settings that the recipe left open, chosen before the first step and written to plan.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from trimtab.runs.outlook import AnyOutlook, outlook_as_dict, read_outlook
from trimtab.techniques.apply import describe, values_in_plan
from trimtab.techniques.base import StepSpec
from trimtab.techniques.optimizer_state import OptimizerState


@dataclass(frozen=True)
class Plan:
    """How one run computes its steps: every setting that the recipe left open, and the prediction.

    The value of each technique is also an attribute with the technique's key, such as `plan.loss`. So are the values of
    the prediction, such as `plan.predicted_peak_bytes`; they are None if nothing was predicted: on a CPU without a
    budget, and for a model whose step cannot be traced.

    Attributes:
        device: The device on which this process trains.
        spec: The specification of a step: micro-batch size, precision and a value for each technique.
        texts: The value of each technique, as written to plan.json.
        micro_batch_tokens: The maximum number of tokens in a packed micro-batch of one process; None if batches are
            divided by rows.
        num_scored_rows: The number of held-out rows that an evaluation scores; None in plans of older versions.
        outlook: The prediction, or the measurements of trial steps.
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
    num_scored_rows: int | None = None
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
        """Build a plan from the contents of plan.json; older versions are accepted, and unknown keys are ignored."""
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
        """Rows that one process computes in one forward."""
        return self.spec.micro_batch

    @property
    def global_micro_batch(self) -> int:
        """Rows of a micro-batch over all processes."""
        return min(self.micro_batch_size * self.num_processes, self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
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

    def held_out_words(self) -> str:
        """How many held-out rows there are, or of how many of them an evaluation scores some."""
        scored = self.num_scored_rows
        some = "" if scored in (None, self.num_eval_rows) else f"{scored:,} of "
        return f"{some}{self.num_eval_rows:,} held-out rows"

    def describe(self) -> list[str]:
        """Return the lines that are logged before a run starts."""
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
            f"{self.num_train_rows:,} training rows, {self.held_out_words()}; length ≤ {self.max_length}, "
            f"{self.padding_share:.1%} padding",
            f"{self.num_steps:,} steps of {self.batch_size} rows{cut} ({self.steps_per_epoch:,} per epoch), "
            f"warmup {self.warmup_steps:,}; best model by {self.metric}",
        ]


def stored_plan(folder: Path) -> Plan | None:
    """The plan of the run in a folder, if there is one."""
    try:
        return Plan.from_dict(json.loads((folder / "plan.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"
