"""The memory of a step over time, by anatomy: what the pictures of the documentation show."""

from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.hardware.catalog import Device
from trimtab.planner.allocator import round_size
from trimtab.planner.anatomy import PARTS, part_of, stage_at
from trimtab.planner.time import op_seconds
from trimtab.planner.trace.recorder import Trace


@dataclass(frozen=True)
class Moment:
    """The memory in use at one moment of the step.

    Attributes:
        position: 0 = start of the step, 1 = its end.
        stage: "forward", "backward" or "optimizer", which begins when the last backward ends.
        parts: Bytes by anatomy.
    """

    position: float
    stage: str
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def timeline(trace: Trace, num_points: int, device: Device | None) -> list[Moment]:
    """Allocated memory over the step; of each interval the moment with the most memory.

    With a device, moments are spaced by predicted time: that of a block is known, the events inside of it are spread
    evenly over it. Operations are added up, so copies and launches that others hide count as if they did not.

    Args:
        trace: The step.
        num_points: The number of intervals, at most.
        device: Its rates; None spaces moments by the number of events.
    """
    times = [float(index) for index in range(len(trace.events))] if device is None else _event_times(trace, device)
    begin = max((mark.event for mark in trace.marks if mark.name.startswith("step")), default=0)
    last_backward = max((mark.event for mark in trace.marks if mark.name == "backward ends"), default=len(times))
    start, end = times[begin], times[-1]
    in_use, living = dict.fromkeys(PARTS, 0), dict[int, int]()
    highest: dict[int, Moment] = {}
    for index, (storage, size) in enumerate(trace.events):
        part = part_of(trace, storage)
        if size:
            living[storage] = round_size(size)
            in_use[part] += living[storage]
        else:
            in_use[part] -= living.pop(storage)
        if index < begin:
            continue
        position = (times[index] - start) / ((end - start) or 1.0)
        interval = min(num_points - 1, int(position * num_points))
        if interval not in highest or sum(in_use.values()) > highest[interval].num_bytes:
            stage = "optimizer" if index >= last_backward else stage_at(trace, index)
            highest[interval] = Moment(position, stage, dict(in_use))
    return [highest[interval] for interval in sorted(highest)]


def _event_times(trace: Trace, device: Device) -> list[float]:
    """The time of each event, in seconds: operations before its segment, and its share of the segment."""
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
