"""What is known about the memory of a run before its first step: predicted from a trace, or measured on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from trimtab.units import format_bytes, format_seconds


@dataclass(frozen=True)
class Outlook:
    """The prediction for a run.

    Attributes:
        budget_bytes: Device memory that the run may use.
        predicted_peak_bytes: The peak of allocated tensors, as the allocator counts it.
        predicted_total_bytes: The memory that the device needs in total.
        predicted_step_s: Seconds of an optimizer step.
        predicted_parts: The peak by anatomy.
        eval_micro_batch: The largest number of held-out rows that one process evaluates in one forward; None if not
            decided here.
        predicted_eval_peak_bytes: The peak of evaluations; if it is higher, it is the peak of the whole run.
        predicted_host_bytes: Peak host memory, while loading or while a checkpoint is saved.
        predicted_disk_bytes: Peak disk space, for checkpoints and the best model.
        why: One sentence: why the plan was chosen.
    """

    origin: ClassVar[str] = "predicted"

    budget_bytes: int
    predicted_peak_bytes: int
    predicted_total_bytes: int
    predicted_step_s: float
    predicted_parts: Mapping[str, int]
    eval_micro_batch: int | None = None
    predicted_eval_peak_bytes: int | None = None
    predicted_host_bytes: int | None = None
    predicted_disk_bytes: int | None = None
    why: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | None:
        """Return the prediction in a plan.json; None if nothing was predicted."""
        if values.get("predicted_peak_bytes") is None:
            return None
        return cls(**{own.name: values.get(own.name) for own in fields(cls)})  # type: ignore[arg-type]

    def words(self) -> str:
        """A line for the summary of a plan."""
        return (
            f"predicted: {format_bytes(self.predicted_total_bytes)} of {format_bytes(self.budget_bytes)}, "
            f"{format_seconds(self.predicted_step_s)} per step{self.host_words()}"
        )

    def host_words(self) -> str:
        """The predicted use of host memory and disk, if there is such a prediction."""
        if self.predicted_host_bytes is None or self.predicted_disk_bytes is None:
            return ""
        host, disk = format_bytes(self.predicted_host_bytes), format_bytes(self.predicted_disk_bytes)
        return f"; at most {host} of host memory, {disk} of disk"


@dataclass(frozen=True)
class MeasuredOutlook:
    """What trial steps on the device measured, for a model whose step cannot be traced.

    Attributes:
        budget_bytes: Device memory that the run may use.
        measured_peak_bytes: The peak of the chosen step, as `trimtab.hardware.memory.peak_memory` counts it.
        measured_total_bytes: The memory that the device needs in total, including memory outside the allocator.
        eval_micro_batch: As in `Outlook`.
        measured_eval_peak_bytes: The peak of an evaluation; None if it was not measured.
        measured_steps: Every trial step in its order: micro-batch size, values of techniques that differ from the first
            trial, bytes needed (None: memory ran out), and whether it fits.
    """

    origin: ClassVar[str] = "measured"

    budget_bytes: int
    measured_peak_bytes: int
    measured_total_bytes: int
    eval_micro_batch: int | None = None
    measured_eval_peak_bytes: int | None = None
    measured_steps: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self | None:
        """Return the measurement in a plan.json; None if nothing was measured."""
        if values.get("measured_peak_bytes") is None:
            return None
        return cls(**{own.name: values[own.name] for own in fields(cls) if own.name in values})

    def words(self) -> str:
        """A line for the summary of a plan."""
        return (
            f"measured, not predicted: {format_bytes(self.measured_total_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, in {len(self.measured_steps)} trial steps on the device"
        )


AnyOutlook = Outlook | MeasuredOutlook


def read_outlook(values: Mapping[str, Any]) -> AnyOutlook | None:
    """The prediction or measurement of memory in a plan.json."""
    return Outlook.from_dict(values) or MeasuredOutlook.from_dict(values)


def outlook_as_dict(outlook: AnyOutlook | None) -> dict[str, Any]:
    """Plain values, for JSON. Values of a missing prediction are None; those of a missing measurement are left out."""
    empty: dict[str, Any] = {own.name: {} if own.name == "predicted_parts" else None for own in fields(Outlook)}
    found = {} if outlook is None else {own.name: _plain(getattr(outlook, own.name)) for own in fields(outlook)}
    return {"origin": None if outlook is None else outlook.origin, **empty, **found}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return list(map(dict, value)) if isinstance(value, list | tuple) else value
