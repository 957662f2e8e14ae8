"""Build the trace of a whole model from the trace of a few of its repeated blocks.

This is not an estimate: the events of one block are repeated with new storages in the right positions. Everything that
reads a trace (peaks, allocator model, times) gets the same result as from a trace of the whole model.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.planner.trace.recorder import Birth, Event, Mark, Op, Owner, Place, Recorder, Segment, Trace

_VISITS_OF_SOME = ("weights", "state")  # only blocks with buffers are visited again after all parameters
# Blocks to keep before and after the repeated unit, because their neighbours differ. Two before it: if embeddings are
# frozen, a compiled first block gets a copy of its input, so what the second block frees of it differs as well.
_BEFORE, _AFTER = 2, 2


class NotPeriodic(Exception):  # noqa: N818 (the cure is to trace the whole model)
    """The traced blocks do not determine the trace of the other blocks."""


@dataclass(frozen=True)
class Repeat:
    """The repeated unit of a stack of blocks.

    Attributes:
        first: The first block of the unit, in the traced model.
        period: Number of blocks in the unit.
        num_more: Number of repetitions to add to the traced one.
    """

    first: int
    period: int
    num_more: int


def find_repeat(kinds: Sequence[Any], *, reaches_far: bool = True) -> tuple[Repeat, list[int]] | None:
    """Determine how a stack of blocks can be shortened.

    Args:
        kinds: A value for each block; blocks with equal values are interchangeable.
        reaches_far: Whether a block may depend on others up to a period away; else on the two before and after it.

    Returns:
        The unit, and the blocks to keep; None if shortening does not help.
    """
    best: tuple[Repeat, list[int]] | None = None
    for period in range(1, len(kinds) // 2 + 1):
        begin, end = _longest_run(kinds, period)
        beside = period if reaches_far else 0
        first = begin + max(_BEFORE, beside)
        room = end - first - max(_AFTER, beside)  # blocks that may be the unit or be left out
        num_units = room // period
        if num_units < 2:
            continue
        num_out = (num_units - 1) * period
        kept = [*range(first + period), *range(first + period + num_out, len(kinds))]
        if best is None or len(kept) < len(best[1]):
            best = Repeat(first, period, num_units - 1), kept
    return best


def _longest_run(kinds: Sequence[Any], period: int) -> tuple[int, int]:
    """Start and end of the longest range in which every block equals the one a period before."""
    best, begin = (0, 0), 0
    for index in range(len(kinds) + 1):
        if index == len(kinds) or (index >= begin + period and kinds[index] != kinds[index - period]):
            if index - begin > best[1] - best[0]:
                best = begin, index
            begin = index - period + 1
    return best


# ---------------------------------------------------------------------- watching blocks


def watch_blocks(stacks: Sequence[Sequence[torch.nn.Module]], recorder: Recorder) -> None:
    """Register hooks that tell a recorder which block runs, in forward and in backward."""
    for stack, blocks in enumerate(stacks):
        for number, block in enumerate(blocks):
            _watch(block, Owner(stack, number), len(blocks), recorder)


def _watch(block: torch.nn.Module, owner: Owner, num_blocks: int, recorder: Recorder) -> None:
    def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if recorder.is_in_backward:
            return
        recorder.enter("forward", owner)
        if owner.block == 0:
            for tensor in _floating((*args, *kwargs.values())):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: recorder.enter("", None))  # type: ignore[no-untyped-call]
                    break

    def after(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if recorder.is_in_backward:
            return
        if owner.block == num_blocks - 1:
            recorder.enter("", None)
        for tensor in _floating(output if isinstance(output, tuple | list) else (output,)):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: recorder.enter("backward", owner))  # type: ignore[no-untyped-call]
                break

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after, with_kwargs=True)


def _floating(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


# ---------------------------------------------------------------------- the whole from the part


def extend(trace: Trace, repeats: dict[int, Repeat]) -> Trace:
    """Build the trace of the whole model from the trace of a shortened one.

    Args:
        trace: The trace of the shortened model.
        repeats: The unit of every shortened stack, by number of the stack.

    Raises:
        NotPeriodic: The traced blocks do not repeat consistently.
    """
    return _Extension(trace, repeats).made() if repeats else trace


class _Extension:
    """Extend one trace. A storage of the result is identified by its traced number and its shift in blocks."""

    def __init__(self, trace: Trace, repeats: dict[int, Repeat]) -> None:
        self._trace, self._repeats = trace, repeats
        self._events: list[Event] = []
        self._births: dict[int, Birth] = {}
        self._ops: list[Op] = []
        self._marks: list[Mark] = []
        self._segments: list[Segment] = []
        self._gradients: set[int] = set()
        self._numbers: dict[tuple[int, int], int] = {}  # number in the new trace of each live (storage, shift)
        self._where = self._addresses()
        self._at: dict[tuple[Place, int], int] = {place: storage for storage, place in self._where.items()}
        self._by_place = {segment.place: index for index, segment in enumerate(trace.segments)}
        self._alone = {  # not part of a repeated block
            storage
            for storage, birth in trace.births.items()
            if birth.owner is None or birth.owner.stack not in repeats
        }

    def made(self) -> Trace:
        trace, marks = self._trace, list(self._trace.marks)
        for index, segment in enumerate(trace.segments):
            place = segment.place
            repeat = None if place.owner is None else self._repeats.get(place.owner.stack)
            if repeat is None or place.owner is None:
                self._emit(index, 0, marks)
                continue
            end = repeat.first + repeat.period
            is_last = place.owner.block == self._last_of_unit(place, repeat)
            if place.kind == "backward" and is_last:  # later copies come earlier
                for copy in range(repeat.num_more, 0, -1):
                    self._emit_unit(place, repeat, copy)
            after = place.owner.block >= end
            self._emit(index, repeat.num_more * repeat.period if after else 0, marks)
            if place.kind != "backward" and is_last:
                for copy in range(1, repeat.num_more + 1):
                    self._emit_unit(place, repeat, copy)
        self._marks += [Mark(mark.name, len(self._events)) for mark in marks]
        mortal = {storage for storage, size in trace.events if not size}
        if any(storage in mortal for storage, _ in self._numbers):
            raise NotPeriodic("a storage is never freed, but it was in the trace")
        return Trace(
            tuple(self._events),
            self._births,
            tuple(self._ops),
            tuple(self._marks),
            frozenset(self._gradients),
            tuple(self._segments),
            {},
            trace.stacks,
            trace.remarks,
        )

    def _addresses(self) -> dict[int, tuple[Place, int]]:
        """The location where each storage was allocated: the place, and the index among its allocations."""
        found: dict[int, tuple[Place, int]] = {}
        for index, segment in enumerate(self._trace.segments):
            count = 0
            for event in self._events_of(index):
                if event.size:
                    found[event.storage] = segment.place, count
                    count += 1
        return found

    def _span(self, index: int) -> tuple[int, int, int, int]:
        segments, trace = self._trace.segments, self._trace
        here = segments[index]
        if index + 1 < len(segments):
            return here.first_event, segments[index + 1].first_event, here.first_op, segments[index + 1].first_op
        return here.first_event, len(trace.events), here.first_op, len(trace.ops)

    def _events_of(self, index: int) -> tuple[Event, ...]:
        first, end, _, _ = self._span(index)
        return self._trace.events[first:end]

    def _emit_unit(self, place: Place, repeat: Repeat, copy: int) -> None:
        assert place.owner is not None
        numbers = range(repeat.first, repeat.first + repeat.period)
        for block in reversed(numbers) if place.kind == "backward" else numbers:
            there = self._place_of(place, block)
            if there not in self._by_place:
                if place.kind in _VISITS_OF_SOME:
                    continue
                raise NotPeriodic(f"{there} was not traced")
            self._emit(self._by_place[there], copy * repeat.period, [])

    def _last_of_unit(self, place: Place, repeat: Repeat) -> int:
        """The last block of the repeated unit that has this place."""
        assert place.owner is not None
        last = repeat.first + repeat.period - 1
        if place.kind in _VISITS_OF_SOME:
            while last >= repeat.first and self._place_of(place, last) not in self._by_place:
                last -= 1
        return last

    @staticmethod
    def _place_of(place: Place, block: int) -> Place:
        """The same place in another block."""
        assert place.owner is not None
        return Place(place.kind, Owner(place.owner.stack, block), place.number)

    def _emit(self, index: int, shift: int, marks: list[Mark]) -> None:
        """Append a segment, with all its contents shifted by a number of blocks."""
        place = self._trace.segments[index].place
        first, end, first_op, end_op = self._span(index)
        owner = place.owner
        moved = place if owner is None else Place(place.kind, Owner(owner.stack, owner.block + shift), place.number)
        self._segments.append(Segment(moved, len(self._events), len(self._ops)))
        events, births, gradients = self._trace.events, self._trace.births, self._trace.gradients
        numbers, written = self._numbers, self._events
        for position in range(first, end):
            while marks and marks[0].event <= position:
                self._marks.append(Mark(marks.pop(0).name, len(written)))
            storage, size = events[position]
            for key in ((storage, 0),) if storage in self._alone else self._keys(storage, owner, shift):
                if not size:
                    dying = numbers.pop(key, None)
                    if dying is None:
                        raise NotPeriodic("a storage is freed before it is allocated, or twice")
                    written.append(Event(dying, 0))
                    continue
                if key in numbers:
                    raise NotPeriodic("a storage is allocated twice")
                number = numbers[key] = len(self._births)
                birth = births[key[0]]
                self._births[number] = _moved(birth, key[1]) if key[1] else birth
                if key[0] in gradients:
                    self._gradients.add(number)
                written.append(Event(number, size))
        for position in range(first_op, end_op):
            self._ops += self._scaled(position)

    def _keys(self, storage: int, here: Owner | None, shift: int) -> list[tuple[int, int]]:
        """The storages of the new trace that a traced storage represents, seen from a block."""
        owner = self._trace.births[storage].owner
        assert owner is not None
        repeat, block = self._repeats[owner.stack], owner.block
        last, whole = repeat.first + repeat.period - 1, repeat.num_more * repeat.period
        if here is None or here.stack != owner.stack:  # between blocks: all copies of it
            if block > last:
                return [(storage, whole)]
            if block < repeat.first:
                return [(storage, 0)]
            return [(storage, copy * repeat.period) for copy in range(repeat.num_more + 1)]
        if block > last and here.block < repeat.first:  # on the other side of all copies: exactly this storage
            return [(storage, whole)]
        if block < repeat.first and here.block > last:
            return [(storage, 0)]
        return [self._counterpart(storage, owner, block + shift, repeat)]

    def _counterpart(self, storage: int, owner: Owner, block: int, repeat: Repeat) -> tuple[int, int]:
        """The corresponding storage in a block of the whole model."""
        whole = repeat.num_more * repeat.period
        if block < repeat.first:
            traced = block
        elif block < repeat.first + repeat.period + whole:
            traced = repeat.first + (block - repeat.first) % repeat.period
        else:
            traced = block - whole
        if traced == owner.block:
            return storage, block - traced
        place, count = self._where[storage]
        if place.owner is None:
            raise NotPeriodic("a storage was allocated between blocks")
        other = self._at.get((Place(place.kind, Owner(owner.stack, traced), place.number), count))
        if other is None or self._trace.births[other][:3] != self._trace.births[storage][:3]:
            raise NotPeriodic(f"no counterpart in block {traced}")
        return other, block - traced

    def _scaled(self, position: int) -> list[Op]:
        """An operation between blocks, repeated for every block, or with the bytes of all blocks summed."""
        op, shares = self._trace.ops[position], self._trace.shares.get(position, {})
        more = [
            (self._repeats[owner.stack].num_more, size) for owner, size in shares.items() if self._is_repeated(owner)
        ]
        if not more:
            return [op]
        if len(shares) == 1:
            return [op] * (more[0][0] + 1)
        return [op._replace(moved=op.moved + sum(count * size for count, size in more))]

    def _is_repeated(self, owner: Owner) -> bool:
        repeat = self._repeats.get(owner.stack)
        return repeat is not None and 0 <= owner.block - repeat.first < repeat.period


def _moved(birth: Birth, shift: int) -> Birth:
    """The same storage in a block `shift` blocks later."""
    owner = birth.owner
    assert owner is not None
    return birth._replace(owner=Owner(owner.stack, owner.block + shift))
