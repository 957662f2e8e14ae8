"""What a step needs of memory: the peak of its trace, split by anatomy, and what the allocator makes of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trimtab.hardware.memory import expected_non_allocator_memory
from trimtab.planner.allocator import peaks, round_size, runs_under, smallest_cap
from trimtab.planner.trace.recorder import Event, Trace

PARTS = ("weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries")


@dataclass(frozen=True)
class Moment:
    """The memory in use at one moment of the step."""

    position: float  # 0 is the beginning of the step, 1 its end
    stage: str
    num_bytes: int


@dataclass(frozen=True)
class Prediction:
    """The memory of one training step on a GPU.

    Attributes:
        allocated: The peak of what tensors take, as `torch.cuda.max_memory_allocated` counts it.
        parts: The same by anatomy, at the moment of the peak.
        stage: In which stage of the step that is.
        outside: Bytes of the device that the allocator does not manage.
        trace: What it was read from.
        expandable: Whether the allocator has expandable segments.
    """

    allocated: int
    parts: Mapping[str, int]
    stage: str
    outside: int
    trace: Trace
    expandable: bool = True

    @cached_property
    def needed(self) -> int:
        """The smallest limit of the allocator under which the step runs."""
        return smallest_cap(self.trace.events, _peak(self.trace.events)[0], expandable=self.expandable)

    @cached_property
    def reserved(self) -> int:
        """What the allocator takes where memory is plentiful."""
        return peaks(self.trace.events, expandable=self.expandable)[1]

    @property
    def total(self) -> int:
        """What the device needs: the allocator's limit and what is outside of it."""
        return self.needed + self.outside

    def fits(self, budget: int) -> bool:
        """Whether the step runs in so many bytes of the device, without looking for the smallest limit."""
        room = budget - self.outside
        if self.expandable and room < self.allocated:  # fixed segments may keep smaller rests under a limit
            return False
        return runs_under(self.trace.events, room, expandable=self.expandable)

    def with_fixed_segments(self) -> "Prediction":
        """The same step where the allocator has fixed segments: blocks keep rests of up to 1 MiB, counted as in use."""
        allocated, _ = peaks(self.trace.events, expandable=False)
        kept = allocated - sum(self.parts.values())
        parts = {**self.parts, "temporaries": self.parts["temporaries"] + kept}
        return replace(self, allocated=allocated, parts=parts, expandable=False)

    def timeline(self, num_points: int = 200) -> list[Moment]:
        """The memory in use over the step, thinned out to the highest of each stretch."""
        return _timeline(self.trace, num_points)


def predict(trace: Trace, *, with_kernels: bool = False) -> Prediction:
    """Read the peak of a traced step.

    Args:
        trace: The step, with everything that was there before.
        with_kernels: Whether kernels of Triton or bitsandbytes are loaded.
    """
    peak, position = _peak(trace.events)
    return Prediction(
        allocated=peak,
        parts=_parts(trace, position),
        stage=_stage_at(trace, position),
        outside=expected_non_allocator_memory(with_kernels),
        trace=trace,
    )


def beside_library_of(trace: Trace, other: Trace) -> Trace:
    """A trace with the work memory that libraries have kept since another one, which came before."""
    known = {birth.op for birth in trace.births.values() if birth.part == "library"}
    kept = [birth for birth in other.births.values() if birth.part == "library" and birth.op not in known]
    first = 1 + max(trace.births, default=0)
    births = {first + number: birth for number, birth in enumerate(kept)}
    events = tuple(Event(storage, birth.size) for storage, birth in births.items())
    later = len(events)
    marks = tuple(replace(mark, event=mark.event + later) for mark in trace.marks)
    return replace(trace, events=(*events, *trace.events), births={**births, **trace.births}, marks=marks)


def _peak(events: Sequence[Event]) -> tuple[int, int]:
    in_use = peak = at = 0
    sizes: dict[int, int] = {}
    for position, (storage, size) in enumerate(events):
        if size:
            sizes[storage] = rounded = round_size(size)
            in_use += rounded
            if in_use > peak:
                peak, at = in_use, position
        else:
            in_use -= sizes.pop(storage)
    return peak, at


def _parts(trace: Trace, position: int) -> dict[str, int]:
    living: dict[int, int] = {}
    for storage, size in trace.events[: position + 1]:
        if size:
            living[storage] = round_size(size)
        else:
            del living[storage]
    found = dict.fromkeys(PARTS, 0)
    for storage, size in living.items():
        found[_part_of(trace, storage)] += size
    return found


def _part_of(trace: Trace, storage: int) -> str:
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


def _stage_at(trace: Trace, position: int) -> str:
    names = [mark.name for mark in trace.marks if mark.event <= position]
    last = names[-1] if names else ""
    return last.removesuffix(" begins") if last.endswith(" begins") else "forward"


def _timeline(trace: Trace, num_points: int) -> list[Moment]:
    begin = max((mark.event for mark in trace.marks if mark.name.startswith("step")), default=0)
    heights, in_use = [], 0
    sizes: dict[int, int] = {}
    for storage, size in trace.events:
        if size:
            sizes[storage] = round_size(size)
            in_use += sizes[storage]
        else:
            in_use -= sizes.pop(storage)
        heights.append(in_use)
    stretch = max(1, (len(heights) - begin) // num_points)
    moments = []
    for start in range(begin, len(heights), stretch):
        part = heights[start : start + stretch]
        at = start + part.index(max(part))
        share = (at - begin) / max(1, len(heights) - begin)
        moments.append(Moment(share, _stage_at(trace, at), max(part)))
    return moments
