"""The memory of a traced step over time: the record from which pictures are drawn."""

from itertools import pairwise

from trimtab.hardware.catalog import Device
from trimtab.planner.allocator import round_size
from trimtab.planner.anatomy import part_of, stage_at
from trimtab.planner.time import op_seconds
from trimtab.planner.trace.module_names import full_name
from trimtab.planner.trace.recorder import Trace
from trimtab.report.step_record import Allocation, StepRecord


def step_record(
    trace: Trace, device: Device | None, *, name: str = "", beyond: dict[str, int] | None = None
) -> StepRecord:
    """The allocations of a traced step.

    With a device, changes are spaced by predicted time: the time of a block is known, and the events inside it are
    spread evenly. The times of operations are added up, so copies and launches that overlap with others count fully.

    Args:
        trace: The step.
        device: Its rates; None spaces changes evenly.
        name: Name of the device.
        beyond: Bytes that are not allocated, by name.
    """
    times = event_times(trace, device)
    begin = first_event(trace)
    is_cpu = device is not None and device.is_cpu
    start = times[begin] if begin < len(times) else 0.0
    return StepRecord(
        source="predicted",
        device=name,
        allocations=tuple(_allocations(trace, begin, with_libraries=not is_cpu)),
        times=tuple(time - start for time in times[begin:]),
        stages=_stages(trace, begin),
        beyond=beyond or {},
        is_timed=device is not None,
    )


def first_event(trace: Trace) -> int:
    """Index of the first event of the step; earlier events allocate what exists before it."""
    return max((mark.event for mark in trace.marks if mark.name.startswith("step")), default=0)


def name_of(trace: Trace, storage: int) -> str:
    """The module or parameter that a storage belongs to; the name of its library for a workspace."""
    birth = trace.births[storage]
    if birth.part == "library":
        return f"{birth.op} workspace"
    if birth.part == "inputs":
        return "batch"
    owner = birth.owner
    is_known = owner is not None and owner.stack < len(trace.stacks)
    stack = trace.stacks[owner.stack] if owner is not None and is_known else None
    return full_name(birth.name, stack, owner.block if owner is not None and is_known else None)


def _allocations(trace: Trace, begin: int, *, with_libraries: bool) -> list[Allocation]:
    deaths = {storage: index for index, (storage, size) in enumerate(trace.events) if not size}
    found = []
    for index, (storage, size) in enumerate(trace.events):
        died = deaths.get(storage)
        if not size or (died is not None and died < begin) or not (with_libraries or _is_tensor(trace, storage)):
            continue
        born = index - begin if index >= begin else -1
        op = "" if trace.births[storage].part == "library" else trace.births[storage].op.removeprefix("aten.")
        end = None if died is None else died - begin
        found.append(Allocation(round_size(size), part_of(trace, storage), name_of(trace, storage), op, born, end))
    return found


def _is_tensor(trace: Trace, storage: int) -> bool:
    return trace.births[storage].part != "library"


def _stages(trace: Trace, begin: int) -> tuple[tuple[str, int], ...]:
    last_backward = max((mark.event for mark in trace.marks if mark.name == "backward ends"), default=len(trace.events))
    events = sorted({begin, *(mark.event for mark in trace.marks if mark.event > begin)})
    found = [("optimizer" if event >= last_backward else stage_at(trace, event), event - begin) for event in events]
    changed = [following for before, following in pairwise(found) if following[0] != before[0]]
    return (found[0], *(stage for stage in changed if stage[1] < len(trace.events) - begin))


def event_times(trace: Trace, device: Device | None) -> list[float]:
    """The time of each event in seconds: that of the operations before its segment, plus its share of the segment.

    Without a device, the number of the event.
    """
    if device is None:
        return [float(index) for index in range(len(trace.events))]
    times: list[float] = []
    now = 0.0
    segments = [*trace.segments, None]
    for segment, following in zip(segments, segments[1:], strict=False):
        assert segment is not None
        last_event = len(trace.events) if following is None else following.first_event
        ops = trace.ops[segment.first_op : None if following is None else following.first_op]
        seconds = sum(max(op_seconds(op, device)) for op in ops if op.stage != "transfer")
        first_event = len(times)  # workspaces of libraries come before the first segment
        num_events = last_event - first_event
        times += [now + seconds * number / num_events for number in range(1, num_events + 1)]
        now += seconds
    return times
