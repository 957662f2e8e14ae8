"""The search for a plan: which levers and how many rows at once, given a callable that predicts a candidate.

Two facts keep it short. More levers need less memory and are not faster, so that what is reached without a lever need
not be sought with it. And memory is near linear in the rows, so that the most rows that fit are guessed, then verified.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

_MOST_BY_LINE = 4  # measurements, before the middle is tried


@dataclass(frozen=True)
class Candidate:
    """One way to make a step.

    Attributes:
        rows: Of a micro-batch.
        loss: How the loss is computed.
        optimizer: Its name.
        offload: What lies in host memory.
        recomputed: Which blocks are recomputed, as a recipe writes it.
        kernels: What norms run on.
        adapter: What trains in the place of the weights: "none", "lora" or "qlora".
    """

    rows: int
    loss: str = "plain"
    optimizer: str = "adamw"
    offload: str = "none"
    recomputed: str = "none"
    kernels: str = "plain"
    adapter: str = "none"


@dataclass(frozen=True)
class Estimate:
    """What is predicted of a candidate.

    Attributes:
        fits: Whether it runs within the budget, with a little to spare.
        allocated_bytes: The peak of what tensors take.
        outside_bytes: What the device needs besides.
        parts: The peak by anatomy.
        step_s: Seconds of an optimizer step.
        tokens_s: Tokens a second.
    """

    fits: bool
    allocated_bytes: int
    outside_bytes: int
    parts: Mapping[str, int]
    step_s: float
    tokens_s: float


@dataclass(frozen=True)
class Row:
    """A candidate and what is predicted of it."""

    candidate: Candidate
    estimate: Estimate

    @property
    def bytes_at_least(self) -> int:
        """What the device needs at least; the allocator adds a little."""
        return self.estimate.allocated_bytes + self.estimate.outside_bytes


@dataclass(frozen=True)
class Space:
    """What may be chosen; of each the fastest first.

    Attributes:
        rows: The sizes of a micro-batch, the largest first.
        losses: "plain", and "chunked" where the task has logits to spare.
        optimizers: The recipe's, and its 8-bit form where that is allowed.
        offloads: "none", and "embeddings" where they do not train.
        recomputed: "none", then more and more blocks.
        kernels: Decided already.
        adapter: Decided already.
    """

    rows: tuple[int, ...]
    losses: tuple[str, ...] = ("plain",)
    optimizers: tuple[str, ...] = ("adamw",)
    offloads: tuple[str, ...] = ("none",)
    recomputed: tuple[str, ...] = ("none",)
    kernels: str = "plain"
    adapter: str = "none"

    def lever_sets(self) -> Iterator[Candidate]:
        """Every set of levers, at the most rows: what costs little speed comes first, recomputation last."""
        for recomputed, optimizer, offload, loss in product(
            self.recomputed, self.optimizers, self.offloads, self.losses
        ):
            yield Candidate(self.rows[0], loss, optimizer, offload, recomputed, self.kernels, self.adapter)

    def has_more(self, more: Candidate, less: Candidate) -> bool:
        """Whether one set of levers is the other one and more, so that it is slower.

        Not so the loss in chunks: it is faster on some devices, and much slower on old ones in fp16.
        """
        if more.loss != less.loss:
            return False
        pairs = (
            (self.optimizers, more.optimizer, less.optimizer),
            (self.offloads, more.offload, less.offload),
            (self.recomputed, more.recomputed, less.recomputed),
        )
        steps = [values.index(one) - values.index(other) for values, one, other in pairs]
        return min(steps) >= 0 and max(steps) > 0


@dataclass(frozen=True)
class Ladder:
    """What a search found: everything that was predicted, the fastest first, and the row that was chosen."""

    rows: tuple[Row, ...]
    chosen: Row | None

    @property
    def smallest(self) -> Row:
        """The row that needs least."""
        return min(self.rows, key=lambda row: (row.bytes_at_least, row.estimate.step_s))


Predict = Callable[[Candidate], Estimate | None]


def search(space: Space, predict: Predict, *, room: int, thorough: bool = False) -> Ladder:
    """Find the fastest candidate that fits.

    Args:
        space: What may be chosen.
        predict: Says what a candidate takes, or None where it cannot be; it is asked for each once.
        room: Bytes that there are, to guess by.
        thorough: Look also at what could not be chosen any more: each set of levers, down to the smallest.

    Returns:
        The rows that were looked at; none is chosen where none fits.
    """
    found: dict[Candidate, Row | None] = {}

    def look(candidate: Candidate) -> Row | None:
        if candidate not in found:
            estimate = predict(candidate)
            found[candidate] = None if estimate is None else Row(candidate, estimate)
        return found[candidate]

    widest: list[Row] = []
    for levers in space.lever_sets():
        # what is slower than a set that fits is looked at only to be shown
        is_slower = any(row.estimate.fits and space.has_more(levers, row.candidate) for row in widest)
        row = look(levers) if thorough or not is_slower else None
        if row is not None:
            widest.append(row)
    widest.sort(key=lambda row: row.estimate.step_s)
    best = next((row for row in widest if row.estimate.fits), None)
    if best is None and widest:  # what needs least holds most rows, which sets a pace for the others
        best = _most_rows(min(widest, key=lambda row: row.bytes_at_least), space.rows[1:], look, room, None)
    for row in widest:
        if best is not None and not _is_faster(row, best):
            break  # with fewer rows it is slower still
        fitting = _most_rows(row, space.rows[1:], look, room, best)
        if fitting is not None and (best is None or _is_faster(fitting, best)):
            best = fitting
    if thorough or best is None:
        *_, last = space.lever_sets()
        look(replace(last, rows=space.rows[-1]))
        if thorough:
            _show_what_follows(best, space, look)
    rows = [row for row in found.values() if row is not None]
    return Ladder(tuple(sorted(rows, key=lambda row: row.estimate.step_s)), best)


def _is_faster(row: Row, best: Row) -> bool:
    """A gain within the noise of a prediction is none."""
    return row.estimate.step_s < 0.99 * best.estimate.step_s


def _show_what_follows(best: Row | None, space: Space, look: Callable[[Candidate], Row | None]) -> None:
    """One step down from what was chosen: half the rows with the same levers."""
    smaller = [rows for rows in space.rows if best is not None and rows < best.candidate.rows]
    if best is not None and smaller:
        look(replace(best.candidate, rows=smaller[0]))


def _most_rows(
    widest: Row, sizes: Sequence[int], look: Callable[[Candidate], Row | None], room: int, best: Row | None
) -> Row | None:
    """The most rows that fit with the levers of a row that does not.

    Args:
        widest: That row.
        sizes: Fewer rows, the largest number first.
        look: Gives the row of a candidate.
        room: Bytes that there are.
        best: What has to be faster, or the search ends.
    """
    levers, above = widest.candidate, widest
    fitting = look(replace(levers, rows=sizes[-1])) if sizes else None
    if fitting is None or not fitting.estimate.fits:
        return None
    high, low = 0, len(sizes) - 1  # the first that is open, and one that fits
    while high < low:
        at = high + _guess(sizes[high:low], fitting, above, room)
        if best is not None and _seconds_between(fitting, widest, sizes[at]) > best.estimate.step_s:
            return None
        row = look(replace(levers, rows=sizes[at]))
        if row is not None and row.estimate.fits:
            fitting, low = row, at
        else:
            above, high = row or above, at + 1
            if best is not None and not _is_faster(above, best):
                return None
    return fitting


def _seconds_between(few: Row, many: Row, rows: int) -> float:
    """The seconds of a step with a number of rows between two known ones: each micro-batch costs the same on top."""
    share = (1 / rows - 1 / many.candidate.rows) / (1 / few.candidate.rows - 1 / many.candidate.rows)
    return many.estimate.step_s + share * (few.estimate.step_s - many.estimate.step_s)


def _guess(sizes: Sequence[int], fits: Row, fails: Row, room: int) -> int:
    """The position of the most rows that should fit, by the line through what is known."""
    slope = (fails.bytes_at_least - fits.bytes_at_least) / (fails.candidate.rows - fits.candidate.rows)
    rows = fits.candidate.rows + (room - fits.bytes_at_least) / max(slope, 1.0)
    return next((at for at, size in enumerate(sizes) if size <= rows), len(sizes) - 1)


def largest(
    measure: Callable[[int], tuple[int, bool]], room: int, *, first: int, most: int, step: int = 1
) -> int | None:
    """The largest number that fits, where memory grows with it, in few measurements.

    Args:
        measure: The bytes of a number, and whether it fits.
        room: Bytes that there are, to guess by.
        first: Where to begin.
        most: Nothing larger is tried.
        step: Only multiples of it are tried.

    Returns:
        The number; None where even `step` does not fit.
    """
    known: dict[int, int] = {}  # in steps, as everything here
    low, high = 0, most // step + 1  # what lies between them is open
    at = first // step
    while high - low > 1:
        at = min(max(at, low + 1), high - 1)
        known[at], fits = measure(at * step)
        low, high = (at, high) if fits else (low, at)
        if len(known) < 2:
            at = at * 2 if fits else at // 2
        elif len(known) % _MOST_BY_LINE == 0:  # no line, it seems
            at = (low + high) // 2
        else:
            at = int(_crossing(known, room, low, high))
    return low * step or None


def _crossing(known: Mapping[int, int], room: int, low: int, high: int) -> float:
    """Where a line reaches the limit: the one between what fits and what does not, else through the two nearest."""
    nearest = sorted(known, key=lambda number: abs(known[number] - room))
    one, other = (low, high) if low in known and high in known else nearest[:2]
    slope = (known[other] - known[one]) / (other - one)
    return one + (room - known[one]) / slope if slope > 0 else 2.0 * max(one, other)
