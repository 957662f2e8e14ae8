"""Choose a step by measuring, for models whose step cannot be traced: trial steps of growing size on the device.

The search starts with the smallest micro-batch: first the step without a plan, then with one more technique at a time,
cheap ones first. The first of these that fits is used, and its micro-batch grows from there. Memory is a linear
function of the tokens of a micro-batch, or the maximum of several; so a line through two measurements shows which sizes
cannot fit. A size that should fit is measured before it is chosen.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from trimtab.techniques.apply import refusal
from trimtab.techniques.base import Axis, Case, StepSpec

_MOST_GROWTH = 8  # times the largest measured size: a line through two small sizes may be far off


@dataclass(frozen=True)
class Measured:
    """A trial step.

    Attributes:
        spec: Its specification.
        num_tokens: Tokens of its micro-batch.
        fits: Whether it ran within the budget, less a small reserve.
        peak_bytes: Its peak, as `trimtab.hardware.memory.peak_memory` counts it; None if memory ran out.
        total_bytes: The same, including memory outside the allocator.
    """

    spec: StepSpec
    num_tokens: int
    fits: bool
    peak_bytes: int | None = None
    total_bytes: int | None = None


class Probe:
    """Search for the step of a run with few trial steps.

    Args:
        measure: Runs a trial step.
        room: Bytes that a step may take.
        sizes: Micro-batch sizes that may be chosen.
    """

    def __init__(self, measure: Callable[[StepSpec], Measured], room: int, sizes: Iterable[int]) -> None:
        self._measure, self._room, self._sizes = measure, room, sorted(sizes)
        self.trials: list[Measured] = []

    def choose(self, ways: Sequence[StepSpec]) -> Measured | None:
        """The first specification that fits, with its largest micro-batch; None if none fits.

        Args:
            ways: Specifications, each of which needs less memory and more time than the one before.
        """
        for way in ways:
            found = self.measure(way.with_micro_batch(self._sizes[0]))
            if found.fits:
                return self._grow(found)
        return None

    def measure(self, spec: StepSpec) -> Measured:
        """Run a trial step and store its result."""
        found = self._measure(spec)
        self.trials.append(found)
        return found

    def _grow(self, smallest: Measured) -> Measured:
        fitting, open_sizes = [smallest], self._sizes[1:]
        while open_sizes:
            size = self._next_size(fitting, open_sizes)
            if size is None:
                break
            found = self.measure(smallest.spec.with_micro_batch(size))
            if found.fits:
                fitting.append(found)
            open_sizes = [other for other in open_sizes if (other > size if found.fits else other < size)]
        return fitting[-1]

    def _next_size(self, fitting: Sequence[Measured], open_sizes: Sequence[int]) -> int | None:
        """The largest size that should fit; None if not even the next size should."""
        last = fitting[-1]
        if len(fitting) == 1:
            return open_sizes[0]
        tokens_per_row = last.num_tokens / last.spec.micro_batch
        slope, start = line_through(*fitting[-2:])
        near = [size for size in open_sizes if size <= _MOST_GROWTH * last.spec.micro_batch] or open_sizes[:1]
        return max((size for size in near if start + slope * size * tokens_per_row <= self._room), default=None)


def line_through(one: Measured, other: Measured) -> tuple[float, float]:
    """Bytes per token, and the bytes of a step without tokens, from two trial steps that succeeded."""
    assert one.total_bytes is not None
    assert other.total_bytes is not None
    num_tokens = other.num_tokens - one.num_tokens
    slope = max(0.0, (other.total_bytes - one.total_bytes) / num_tokens) if num_tokens else 0.0
    return slope, other.total_bytes - slope * other.num_tokens


def ways_to_measure(start: StepSpec, axes: Iterable[Axis], case: Case) -> list[StepSpec]:
    """Specifications to measure, each with one more value of a technique that trades time for memory.

    Exact techniques come first, then techniques that change results slightly and that the user has allowed, then last
    resorts.

    Args:
        start: The step without a plan.
        axes: The values that each technique may have.
        case: The input of the techniques' rules.
    """
    found = [start]
    traded = [axis for axis in axes if axis.technique.is_slower_with_each_value]
    values = [
        (_order(axis, value), axis.technique.key, value)
        for axis in traded
        for value in axis.values[axis.values.index(start[axis.technique.key]) + 1 :]
    ]
    for _, key, value in sorted(values, key=lambda entry: entry[0]):
        way = found[-1].having({key: value})
        if refusal(way, case) is None:
            found.append(way)
    return found


def _order(axis: Axis, value: str) -> int:
    technique = axis.technique
    is_last = technique.last_resorts is None or value in technique.last_resorts
    return 2 if is_last else int(technique.effect == "rounding")
