"""The search for a plan: the Pareto front of memory and time over micro-batch sizes and techniques.

Predictions are expensive, so the search keeps their number low:

- Memory is nearly linear in the micro-batch size, so the largest size that fits is guessed, then verified.
- A technique may declare that each of its values is slower and smaller than the one before. Only then are values after
  one that fits skipped, and values before one that does not fit.
- A peak is the maximum over several points in time. At each of them, memory is nearly linear in the share of the model
  to which such a technique is applied. So the peak is a convex function, and lines through predicted values are lower
  bounds for others (`_too_large`).
- A technique that declares nothing may be faster or slower, smaller or larger: all its values are predicted.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from trimtab.techniques.base import Axis, Phase, StepSpec

_MOST_BY_LINE = 4  # number of measurements before the middle is tried
_START_WEIGHT, _MARGIN = 2.0, 1.01  # see `ranked_seconds`
# times the room: skip values above this on the line between first and last value; plans lie below that line
_CLEARLY = 1.5
_SURELY = 1.02  # times the room: skip values whose lower bound is above this


@dataclass(frozen=True)
class Estimate:
    """The prediction for a specification.

    Attributes:
        fits: Whether it runs within the budget, less a small reserve.
        allocated_bytes: The peak of allocated tensors.
        outside_bytes: Device memory outside the allocator.
        parts: The peak by anatomy.
        step_s: Seconds of an optimizer step.
        tokens_s: Tokens per second.
        start_s: Seconds before the first step, for example to compile.
        num_steps: Steps of the run.
        excess_host_bytes: The host memory that it needs, if it fits on the device, but not on the host.
    """

    fits: bool
    allocated_bytes: int
    outside_bytes: int
    parts: Mapping[str, int]
    step_s: float
    tokens_s: float
    start_s: float = 0.0
    num_steps: int = 1
    excess_host_bytes: int | None = None

    @property
    def ranked_s(self) -> float:
        """The seconds by which estimates are compared."""
        return ranked_seconds(self.step_s, self.start_s, self.num_steps)


def ranked_seconds(step_s: float, start_s: float, num_steps: int) -> float:
    """Seconds of a step, plus its share of the time before the first step, to compare plans of a run.

    A slow start has to be clearly worth it: times are estimates, and the user waits for the first step. So the start
    counts twice, and the step itself has to be faster by a margin.
    """
    return step_s * _MARGIN + _START_WEIGHT * start_s / num_steps if start_s else step_s


@dataclass(frozen=True)
class Row:
    """A specification and its prediction."""

    spec: StepSpec
    estimate: Estimate

    @property
    def least_bytes(self) -> int:
        """Lower bound of the bytes needed on the device; the allocator adds a little."""
        return self.estimate.allocated_bytes + self.estimate.outside_bytes


@dataclass(frozen=True)
class Space:
    """The specifications among which a plan chooses.

    Attributes:
        micro_batches: The micro-batch sizes, largest first.
        precision: As in `StepSpec`.
        axes: The values of each technique.
    """

    micro_batches: tuple[int, ...]
    precision: str
    axes: tuple[Axis, ...] = ()

    def sets(self) -> Iterator[StepSpec]:
        """Every combination of values, with the largest micro-batch; cheap techniques come first."""
        ordered = sorted(self.axes, key=lambda axis: -axis.technique.phase)  # recomputation varies slowest
        for values in product(*(axis.values for axis in ordered)):
            keys = (axis.technique.key for axis in ordered)
            yield StepSpec.of(self.micro_batches[0], self.precision, dict(zip(keys, values, strict=True)))

    def is_known_slower(self, one: StepSpec, other: StepSpec) -> bool:
        """Whether techniques declare that a specification is slower than another one that is otherwise equal."""
        steps = []
        for axis in self.axes:
            key = axis.technique.key
            if axis.technique.is_slower_with_each_value:
                steps.append(axis.values.index(one[key]) - axis.values.index(other[key]))
            elif one[key] != other[key]:
                return False
        return bool(steps) and min(steps) >= 0 and max(steps) > 0

    def between(self, spec: StepSpec) -> Axis | None:
        """The only technique that declares slower and smaller values and has one between the first and the last here.

        None unless there is exactly one.
        """
        found = [
            axis
            for axis in self.axes
            if axis.technique.is_slower_with_each_value
            and spec[axis.technique.key] not in (axis.values[0], axis.values[-1])
        ]
        return found[0] if len(found) == 1 else None

    def order(self, spec: StepSpec) -> int:
        """The order in which specifications are predicted: ends first, then the middle; they bound the others."""
        axis = self.between(spec)
        return 0 if axis is None else 1 if spec[axis.technique.key] == axis.middle else 2

    def with_smallest_values(self, spec: StepSpec) -> StepSpec:
        """The same specification with the smallest values of techniques that declare them, except recomputation."""
        return spec.having(self._ends(-1))

    def with_largest_values(self, spec: StepSpec) -> StepSpec:
        """The same specification with the largest values of techniques that declare them, except recomputation."""
        return spec.having(self._ends(0))

    def _ends(self, at: int) -> dict[str, str]:
        return {
            axis.technique.key: axis.values[at]
            for axis in self.axes
            if axis.technique.is_slower_with_each_value and axis.technique.phase is not Phase.RECOMPUTATION
        }

    def reference(self) -> StepSpec:
        """The first value of each technique."""
        values = {axis.technique.key: axis.values[0] for axis in self.axes}
        return StepSpec.of(self.micro_batches[0], self.precision, values)


@dataclass(frozen=True)
class Ladder:
    """The result of a search: all predicted rows, fastest first, and the chosen one."""

    rows: tuple[Row, ...]
    chosen: Row | None

    @property
    def smallest(self) -> Row:
        """The row that needs the least memory."""
        return min(self.rows, key=lambda row: (row.least_bytes, row.estimate.ranked_s))

    def front(self) -> list[Row]:
        """The Pareto front: rows that no other row beats in both memory and time, fastest first."""
        front: list[Row] = []
        for row in sorted(self.rows, key=lambda row: (row.estimate.ranked_s, row.least_bytes)):
            if not front or row.least_bytes < front[-1].least_bytes:
                front.append(row)
        return front


Predict = Callable[[StepSpec], Estimate | None]


def search(space: Space, predict: Predict, *, room: int, thorough: bool = False) -> Ladder:
    """Find the fastest specification that fits.

    Args:
        space: The specifications that may be chosen.
        predict: Predicts a specification, or returns None if the model does not support it; called once for each.
        room: Bytes of the budget, for guesses.
        thorough: Whether to predict specifications that can no longer be chosen, too, down to the smallest.

    Returns:
        The predicted rows; none is chosen if none fits.
    """
    rows = _Predicted(predict)
    widest = _with_whole_batch(space, rows, room, thorough)
    best = next((row for row in widest if row.estimate.fits), None)
    sizes = space.micro_batches[1:]
    if best is None and widest:  # the smallest set allows the largest micro-batch: its time has to be beaten
        best = _largest_micro_batch(min(widest, key=lambda row: row.least_bytes), sizes, rows.look, room, None)
    for row in widest:
        if best is not None and not _is_faster(row, best):
            break  # smaller micro-batches are slower still
        if sizes and not thorough and not _may_fit(row.spec.with_micro_batch(sizes[-1]), space, rows, room):
            continue
        fitting = _largest_micro_batch(row, sizes, rows.look, room, best)
        if fitting is not None and (best is None or _is_faster(fitting, best)):
            best = fitting
    if thorough or best is None:
        *_, last = space.sets()
        rows.look(last.with_micro_batch(space.micro_batches[-1]))
        if thorough and best is not None:
            _look_one_step_down(best, space, rows.look)
    possible = [row for row in rows.found.values() if row is not None]
    return Ladder(tuple(sorted(possible, key=lambda row: row.estimate.ranked_s)), best)


class _Predicted:
    """The rows of all specifications that were predicted; None for those that the model does not support."""

    def __init__(self, predict: Predict) -> None:
        self.found: dict[StepSpec, Row | None] = {}
        self._predict = predict

    def look(self, spec: StepSpec) -> Row | None:
        """The row of a specification, predicted once."""
        if spec not in self.found:
            estimate = self._predict(spec)
            self.found[spec] = None if estimate is None else Row(spec, estimate)
        return self.found[spec]


def _with_whole_batch(space: Space, rows: _Predicted, room: int, thorough: bool) -> list[Row]:
    """The combinations of techniques with the largest micro-batch, fastest first."""
    widest: list[Row] = []
    for spec in sorted(space.sets(), key=space.order):
        is_slower = any(row.estimate.fits and space.is_known_slower(spec, row.spec) for row in widest)
        if is_slower and not thorough:
            continue
        row = None if thorough else _too_large(spec, space, rows.found, room)
        row = row or rows.look(spec)
        if row is not None:
            widest.append(row)
    return sorted(widest, key=lambda row: row.estimate.ranked_s)


def _may_fit(spec: StepSpec, space: Space, rows: _Predicted, room: int) -> bool:
    """Whether a specification is worth predicting: the smallest one next to it fits on the device."""
    smallest = space.with_smallest_values(spec)
    axis = space.between(smallest)
    if axis is not None:
        for value in (axis.values[0], axis.values[-1], axis.middle):
            rows.look(smallest.having({axis.technique.key: value}))
            if _too_large(smallest, space, rows.found, room) is not None:
                return False
    row = rows.look(smallest)
    # the specification that needs least on the device may need too much host memory, while others use none
    return row is None or row.estimate.fits or row.least_bytes <= _SURELY * room


def _too_large(spec: StepSpec, space: Space, found: Mapping[StepSpec, Row | None], room: int) -> Row | None:
    """The row estimated by lines between predicted rows, if it does not fit; None if it has to be predicted."""
    axis = space.between(spec) if len(space.micro_batches) > 1 else None
    if axis is None:
        return None
    key = axis.technique.key
    known = {
        axis.position(value): row
        for value in axis.values
        if (row := _known_or_sum(spec, {key: value}, {key: axis.values[0]}, space, found)) is not None
    }
    if not {0.0, 1.0} <= known.keys():
        return None
    at, first, last = axis.position(spec[key]), known[0.0].estimate, known[1.0].estimate
    numbers = {
        name: _on_line(at, (0.0, getattr(first, name)), (1.0, getattr(last, name)))
        for name in ("allocated_bytes", "outside_bytes", "step_s", "tokens_s")
    }
    bytes_at = {position: row.estimate.allocated_bytes for position, row in known.items()}
    bound = _lower_bound(at, bytes_at) if axis.shares else None
    if bound is not None:
        numbers["allocated_bytes"] = bound
    needed = numbers["allocated_bytes"] + numbers["outside_bytes"]
    if needed <= (_CLEARLY if bound is None else _SURELY) * room:
        return None
    guessed = replace(
        first,
        fits=False,
        allocated_bytes=int(numbers["allocated_bytes"]),
        outside_bytes=int(numbers["outside_bytes"]),
        step_s=numbers["step_s"],
        tokens_s=numbers["tokens_s"],
    )
    return Row(spec, guessed)


def _known_or_sum(
    spec: StepSpec,
    value: Mapping[str, str],
    first: Mapping[str, str],
    space: Space,
    found: Mapping[StepSpec, Row | None],
) -> Row | None:
    """A predicted row for another value of a technique, or its sum: other techniques save the same for all values."""
    wanted, here = spec.having(value), spec.having(first)
    if found.get(wanted) is not None:
        return found[wanted]
    larger = space.with_largest_values(wanted)
    base, one, other = found.get(larger), found.get(space.with_largest_values(here)), found.get(here)
    if base is None or one is None or other is None:
        return None
    saved = one.estimate.allocated_bytes - other.estimate.allocated_bytes
    return Row(wanted, replace(base.estimate, allocated_bytes=base.estimate.allocated_bytes - saved))


def _on_line(at: float, one: tuple[float, float], other: tuple[float, float]) -> float:
    """The value of the line through two points at a position."""
    return one[1] + (at - one[0]) / (other[0] - one[0]) * (other[1] - one[1])


def _lower_bound(at: float, known: Mapping[float, float]) -> float | None:
    """The lower bound of a convex function at a position: the line through two points on one side of it."""
    before, after = sorted(known_at for known_at in known if known_at < at), sorted(x for x in known if x > at)
    pairs = [pair for pair in (before[-2:], after[:2]) if len(pair) == 2]
    return max((_on_line(at, (x, known[x]), (y, known[y])) for x, y in pairs), default=None)


def _is_faster(row: Row, best: Row) -> bool:
    """Whether a row is faster by more than the noise of a prediction."""
    return row.estimate.ranked_s < 0.99 * best.estimate.ranked_s


def _look_one_step_down(best: Row, space: Space, look: Callable[[StepSpec], Row | None]) -> None:
    """Predict the next smaller micro-batch with the same techniques, to show it in the ladder."""
    smaller = [size for size in space.micro_batches if size < best.spec.micro_batch]
    if smaller:
        look(best.spec.with_micro_batch(smaller[0]))


def _largest_micro_batch(
    widest: Row, sizes: Sequence[int], look: Callable[[StepSpec], Row | None], room: int, best: Row | None
) -> Row | None:
    """The row with the largest micro-batch that fits, with the techniques of a row that does not fit.

    Args:
        widest: The row that does not fit.
        sizes: Smaller micro-batch sizes, largest first.
        look: Predicts a specification.
        room: Bytes of the budget.
        best: The row to beat; the search ends if that is impossible.
    """
    spec, above = widest.spec, widest
    fitting = look(spec.with_micro_batch(sizes[-1])) if sizes else None
    if fitting is None or not fitting.estimate.fits:
        return None
    high, low = 0, len(sizes) - 1  # the first undecided size, and one that fits
    while high < low:
        at = high + _guess(sizes[high:low], fitting, above, room)
        while best is not None and _seconds_between(fitting, widest, sizes[at]) > best.estimate.ranked_s:
            if at == high:
                return None
            at -= 1  # the guess is careful if memory is above a line: try the next size that would be fast enough
        row = look(spec.with_micro_batch(sizes[at]))
        if row is not None and row.estimate.fits:
            fitting, low = row, at
        else:
            above, high = row or above, at + 1
            if best is not None and not _is_faster(above, best):
                return None
    return fitting


def _seconds_between(few: Row, many: Row, size: int) -> float:
    """Seconds of a step with a micro-batch size between two known ones: each micro-batch adds the same time."""
    share = (1 / size - 1 / many.spec.micro_batch) / (1 / few.spec.micro_batch - 1 / many.spec.micro_batch)
    return many.estimate.ranked_s + share * (few.estimate.ranked_s - many.estimate.ranked_s)


def _guess(sizes: Sequence[int], fits: Row, fails: Row, room: int) -> int:
    """The position of the largest size that should fit, by the line through two known rows."""
    slope = (fails.least_bytes - fits.least_bytes) / (fails.spec.micro_batch - fits.spec.micro_batch)
    size = fits.spec.micro_batch + (room - fits.least_bytes) / max(slope, 1.0)
    return next((at for at, known in enumerate(sizes) if known <= size), len(sizes) - 1)


def halved_sizes(batch_size: int) -> Iterator[int]:
    """The micro-batch sizes that a plan can choose from: the whole batch, half of it, and so on."""
    rows = batch_size
    while rows > 1:
        yield rows
        rows = math.ceil(rows / 2)
    yield 1


def largest(
    measure: Callable[[int], tuple[int, bool]], room: int, *, first: int, most: int, step: int = 1
) -> int | None:
    """Find the largest number that fits, in few measurements; memory must grow with the number.

    Args:
        measure: Returns the bytes needed for a number, and whether it fits.
        room: Available bytes, for the linear guess.
        first: The first number to try.
        most: The upper limit.
        step: Only multiples of this are tried.

    Returns:
        The number; None if even `step` does not fit.
    """
    known: dict[int, int] = {}  # in steps, like everything here
    low, high = 0, most // step + 1  # numbers strictly between them are undecided
    at = first // step
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        known[at], fits = measure(at * step)
        low, high = (at, high) if fits else (low, at)
        if len(known) < 2:
            at = at * 2 if fits else at // 2
        elif len(known) % _MOST_BY_LINE == 0:  # apparently not linear
            at = (low + high) // 2
        else:
            at = int(_crossing(known, room, low, high))
    return low * step or None


def _crossing(known: Mapping[int, int], room: int, low: int, high: int) -> float:
    """Interpolate where memory reaches the limit: between `low` and `high` if known, else by the two nearest."""
    nearest = sorted(known, key=lambda number: abs(known[number] - room))
    one, other = (low, high) if low in known and high in known else nearest[:2]
    slope = (known[other] - known[one]) / (other - one)
    return one + (room - known[one]) / slope if slope > 0 else 2.0 * max(one, other)
