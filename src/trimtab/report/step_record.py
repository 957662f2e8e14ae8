"""The allocations of one training step, predicted or measured, from which memory pictures are drawn."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

ALLOCATED = ("weights", "gradients", "optimizer state", "activations", "logits and loss", "temporaries")
STAGES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Allocation:
    """A tensor in memory, or another block.

    Attributes:
        num_bytes: Its size, including the allocator's rounding.
        part: One of `ALLOCATED`.
        name: The module that computed it, or its parameter; empty if neither is known.
        op: The operation that allocated it; empty if it existed before.
        born: Index of the change that allocated it; -1 if it existed before the step.
        died: Index of the change that freed it; None if it outlives the step.
    """

    num_bytes: int
    part: str
    name: str = ""
    op: str = ""
    born: int = -1
    died: int | None = None


@dataclass(frozen=True)
class Moment:
    """The memory in use at one point in time of the step.

    Attributes:
        position: Position in the step: 0 is its start, 1 its end.
        stage: One of `STAGES`.
        parts: Bytes by anatomy.
        change: Index of the change that led to it; -1 at the start.
    """

    position: float
    stage: str
    parts: Mapping[str, int]
    change: int = -1

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class LikeTensors:
    """Tensors of the same size that the same operation allocated in the same module of different blocks."""

    name: str
    op: str
    part: str
    num_bytes: int  # bytes of each
    count: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count


@dataclass(frozen=True)
class StepRecord:
    """The allocations of one training step.

    Attributes:
        source: "predicted" or "measured".
        device: The device of the step.
        allocations: Everything in memory during the step; at any time, the parts add up to the memory in use.
        times: The time of each change, in seconds from the start of the step; empty for a single point in time.
        stages: The stages in order: the name of each, and the index of its first change.
        beyond: Bytes that are not allocated, by name: allocator slack, outside the allocator.
        is_timed: Whether times are seconds; False if only their order is known.
    """

    source: str
    device: str
    allocations: tuple[Allocation, ...]
    times: tuple[float, ...] = ()
    stages: tuple[tuple[str, int], ...] = ()
    beyond: Mapping[str, int] = field(default_factory=dict)
    is_timed: bool = True

    @property
    def seconds(self) -> float:
        """Duration of the step."""
        return self.times[-1] if self.times else 0.0

    def moments(self) -> Iterator[Moment]:
        """Memory after each change, in chronological order; the first is the start of the step."""
        in_use = dict.fromkeys(ALLOCATED, 0)
        changes: list[list[tuple[str, int]]] = [[] for _ in self.times]
        for one in self.allocations:
            if one.born < 0:
                in_use[one.part] += one.num_bytes
            else:
                changes[one.born].append((one.part, one.num_bytes))
            if one.died is not None:
                changes[one.died].append((one.part, -one.num_bytes))
        whole, stages = self.seconds or 1.0, list(self.stages)
        stage = stages.pop(0)[0] if stages else STAGES[0]
        yield Moment(0.0, stage, dict(in_use))
        for index, change in enumerate(changes):
            while stages and stages[0][1] <= index:
                stage = stages.pop(0)[0]
            for part, size in change:
                in_use[part] += size
            yield Moment(self.times[index] / whole, stage, dict(in_use), index)

    def peak(self) -> Moment:
        """The point in time with the most memory."""
        return max(self.moments(), key=lambda moment: moment.num_bytes)

    def timeline(self, num_points: int) -> list[Moment]:
        """For each of `num_points` time intervals, the point with the most memory."""
        highest: dict[int, Moment] = {}
        for moment in self.moments():
            interval = min(num_points - 1, int(moment.position * num_points))
            if interval not in highest or moment.num_bytes > highest[interval].num_bytes:
                highest[interval] = moment
        return [highest[interval] for interval in sorted(highest)]

    def stage_spans(self) -> list[tuple[str, float, float]]:
        """The stages with their start and end, as shares of the step; adjacent ones with the same name are joined."""
        spans: list[tuple[str, float, float]] = []
        whole = self.seconds or 1.0
        for (name, first), following in zip(self.stages, [*self.stages[1:], None], strict=True):
            begin = spans[-1][2] if spans else 0.0
            end = 1.0 if following is None else self._time(following[1] - 1) / whole
            if spans and spans[-1][0] == name:
                spans[-1] = name, spans[-1][1], end
            elif end > begin or first == 0 or following is None:  # the optimizer may take no time that counts
                spans.append((name, begin, end))
        return spans

    def _time(self, change: int) -> float:
        return self.times[min(change, len(self.times) - 1)] if change >= 0 and self.times else 0.0

    def largest(self, at: int, num: int) -> list[LikeTensors]:
        """The largest tensors after a change, grouped over equal blocks, largest first."""
        alive = [one for one in self.allocations if one.born <= at and (one.died is None or one.died > at)]
        return largest_tensors(alive, num)


def largest_tensors(allocations: Sequence[Allocation], num: int) -> list[LikeTensors]:
    """Group the tensors of equal blocks, and return the groups with the most memory."""
    groups: Counter[tuple[str, str, str, int]] = Counter()
    names: dict[tuple[str, str, str, int], list[str]] = {}
    for one in allocations:
        key = re.sub(r"\.\d+(?=\.|$)", ".*", one.name), one.op, one.part, one.num_bytes
        groups[key] += 1
        names.setdefault(key, []).append(one.name)
    found = [
        LikeTensors(names[key][0] if len(set(names[key])) == 1 else key[0], *key[1:], count)
        for key, count in groups.items()
    ]
    return sorted(found, key=lambda group: (-group.total_bytes, group.name, group.op))[:num]
