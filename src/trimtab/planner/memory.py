"""Predict the memory of a step: the peak of its trace, split by anatomy, and the allocator limit that it needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trimtab.hardware.catalog import Device
from trimtab.hardware.memory import expected_non_allocator_memory
from trimtab.planner.allocator import EMPTY_CACHE, peaks, round_size, runs_under, smallest_cap
from trimtab.planner.anatomy import PARTS, part_of, stage_at
from trimtab.planner.graph_memory import GraphMemory, graph_memory, with_graph_workspaces, with_kept
from trimtab.planner.timeline import step_record
from trimtab.planner.trace.recorder import Event, Trace
from trimtab.report.step_record import Moment


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of one training step on a GPU, in bytes.

    Besides the attributes, `needed` is the smallest allocator limit under which the step runs, and `reserved` is what
    the allocator reserves without a limit.

    Attributes:
        allocated: Peak bytes of tensors, as `torch.cuda.max_memory_allocated` counts them.
        parts: The same bytes by anatomy, at the time of the peak.
        stage: Stage of the step in which the peak occurs.
        outside: Device bytes that the allocator does not manage, such as the CUDA context.
        trace: The trace that the prediction was computed from.
        expandable: Whether the allocator has expandable segments.
        graphs: The memory that CUDA graphs hold; None if the step is not captured. `allocated` is the peak during the
            capture, because torch does not count the memory of a replay.
    """

    allocated: int
    parts: Mapping[str, int]
    stage: str
    outside: int
    trace: Trace
    expandable: bool = True
    graphs: GraphMemory | None = None

    @cached_property
    def _events(self) -> tuple[Event, ...]:
        """The requests to the allocator."""
        return self.trace.events if self.graphs is None else self.graphs.events(expandable=self.expandable)

    @cached_property
    def needed(self) -> int:
        """The smallest allocator limit under which the step runs."""
        return smallest_cap(self._events, _peak(self._events)[0], expandable=self.expandable)

    @cached_property
    def reserved(self) -> int:
        """Bytes that the allocator reserves without a limit."""
        return peaks(self._events, expandable=self.expandable)[1]

    @property
    def total(self) -> int:
        """Bytes needed on the device: the allocator limit plus memory outside the allocator."""
        return self.needed + self.outside

    def fits(self, budget: int) -> bool:
        """Whether the step runs within a budget in bytes; cheaper than `needed`, which searches for a limit."""
        room = budget - self.outside
        if self.expandable and room < self.allocated:  # with fixed segments, a limit may leave smaller remainders
            return False
        return runs_under(self._events, room, expandable=self.expandable)

    def with_fixed_segments(self) -> "Prediction":
        """Return the prediction for fixed segments: blocks keep remainders of up to 1 MiB, which count as allocated."""
        allocated, _ = peaks(self.trace.events, expandable=False)
        kept = allocated - sum(self.parts.values())
        parts = {**self.parts, "temporaries": self.parts["temporaries"] + kept}
        return replace(self, allocated=allocated, parts=parts, expandable=False)

    def timeline(self, num_points: int = 200, device: Device | None = None) -> list[Moment]:
        """Return the allocated memory over the step by anatomy, as the maximum of each interval.

        Args:
            num_points: The maximum number of intervals.
            device: The device whose predicted times are the time axis; None counts allocations and frees instead.
        """
        return step_record(self.trace, device).timeline(num_points)


def predict(trace: Trace, *, with_kernels: bool = False, graphs: GraphMemory | None = None) -> Prediction:
    """Predict the memory of a traced step.

    Args:
        trace: The step, with everything allocated before it.
        with_kernels: Whether Triton or bitsandbytes kernels are loaded.
        graphs: The memory that CUDA graphs hold.
    """
    peak, position = _peak(trace.events)
    return Prediction(
        allocated=peak,
        parts=_parts(trace, position),
        stage=stage_at(trace, position),
        outside=expected_non_allocator_memory(with_kernels),
        trace=trace,
        graphs=graphs,
    )


def predict_captured(trace: Trace, *, with_kernels: bool = False) -> Prediction:
    """Predict the memory of a step whose micro-batches are replayed from CUDA graphs.

    Args:
        trace: A step of two micro-batches: gradients exist from the second on, as in every captured one.
        with_kernels: As in `predict`.
    """
    trace = with_graph_workspaces(trace)
    return predict(trace, with_kernels=with_kernels, graphs=graph_memory(trace))


def predict_evaluation(trace: Trace, training: Prediction, *, with_kernels: bool = False) -> Prediction:
    """Predict the memory of an evaluation between training steps, which keep workspaces and CUDA graphs.

    Args:
        trace: The evaluation of a batch.
        training: A training step; captured gradients stay allocated.
        with_kernels: As in `predict`.
    """
    earlier, graphs = training.trace, training.graphs
    known = {birth.op for birth in trace.births.values() if birth.part == "library"}
    kept = [birth for birth in earlier.births.values() if birth.part == "library" and birth.op not in known]
    trace = with_kept(trace, kept)
    if graphs is not None:
        trace = with_kept(trace, [earlier.births[storage] for storage in earlier.gradients], are_gradients=True)
        graphs = graphs.alongside(trace)
    return predict(trace, with_kernels=with_kernels, graphs=graphs)


def _peak(events: Sequence[Event]) -> tuple[int, int]:
    in_use = peak = at = 0
    sizes: dict[int, int] = {}
    for position, (storage, size) in enumerate(events):
        if size:
            sizes[storage] = rounded = round_size(size)
            in_use += rounded
            if in_use > peak:
                peak, at = in_use, position
        elif storage != EMPTY_CACHE.storage:
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
        found[part_of(trace, storage)] += size
    return found
