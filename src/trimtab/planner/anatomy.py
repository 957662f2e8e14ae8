"""The anatomy of a step's memory: the part that a storage belongs to, and the stage of the step at an event."""

from trimtab.planner.trace.recorder import Trace
from trimtab.report.step_record import ALLOCATED as PARTS

__all__ = ["PARTS", "part_of", "stage_at"]


def part_of(trace: Trace, storage: int) -> str:
    """The part of the anatomy that a storage belongs to; one of `PARTS`."""
    birth = trace.births[storage]
    if birth.part == "weights":
        return "weights"
    if birth.part == "state":
        return "optimizer state"
    if storage in trace.gradients:
        return "gradients"
    if birth.part in ("inputs", "library", "optimizer"):
        return "temporaries"
    if birth.is_wide:
        return "logits and loss"
    return "activations" if birth.part in ("forward", "recompute") else "temporaries"


def stage_at(trace: Trace, position: int) -> str:
    """The stage of the step at the event of this index: "forward", "backward" or "optimizer"."""
    names = [mark.name for mark in trace.marks if mark.event <= position]
    last = names[-1] if names else ""
    return last.removesuffix(" begins") if last.endswith(" begins") else "forward"
