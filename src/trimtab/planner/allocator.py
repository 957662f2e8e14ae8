"""Replays the births and deaths of a step's storages on a model of CUDA's caching allocator (torch 2.11 to 2.13).

What it models, for one stream: sizes are rounded up to 512 B; requests up to 1 MiB and larger ones live in two pools
that never share memory; a request takes the smallest free block that is large enough, the rest of it is split off, and
neighbours that are free become one block again. Memory comes in one of two forms:

- fixed segments, torch's default: a request that fits nowhere gets a segment of its own (2 MiB for small ones, 20 MiB
  below 10 MiB, else its size rounded up to 2 MiB). What is left over in a segment is lost to larger requests.
- expandable segments: each pool is one range of addresses, backed on demand by pages of 2 MiB (small) or 20 MiB
  (large). A request that fits nowhere is put at the lowest address where free and unbacked space suffice.

Under a limit, a request that would go beyond it lets the allocator give back all that is free (whole segments, or whole
pages) and is tried once more.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.planner.trace.recorder import Event

MIB = 2**20
ROUNDING = 512
SMALL_LIMIT = MIB  # the largest request of the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT = 10 * MIB  # from this size on a request gets a segment of its own size
SEGMENT_ROUNDING = 2 * MIB
CAP_STEP = 16 * MIB  # how finely the smallest limit is looked for

_ADDRESSES = 2**60  # the range of an expandable segment: never used up
_USED, _FREE, _UNBACKED = range(3)


@dataclass(frozen=True)
class Replay:
    """What a sequence of births and deaths asks of the allocator, in bytes.

    Attributes:
        allocated_peak: The most that was in use at once, as `max_memory_allocated` counts it with expandable segments.
        reserved_peak: The most that was held at once, free memory included, with expandable segments and no limit.
        needed: The smallest limit, in steps of 16 MiB, under which all of it succeeds with expandable segments.
        peak_at: Index of the event that reached `allocated_peak` first; -1 without events.
        allocated_peak_fixed: As `allocated_peak`, with fixed segments: remainders up to 1 MiB are not split off.
        reserved_peak_fixed: As `reserved_peak`, with fixed segments.
    """

    allocated_peak: int
    reserved_peak: int
    needed: int
    peak_at: int
    allocated_peak_fixed: int
    reserved_peak_fixed: int


def replay(events: Iterable[Event]) -> Replay:
    """Replay a trace's events on both forms of the allocator, and look for the smallest limit that they run under.

    Args:
        events: Births and deaths in the order of time; a storage dies at most once, and only after its birth.
    """
    events = tuple(events)
    plain, fixed = CachingAllocator(), CachingAllocator(expandable=False)
    peak_at = _feed(plain, events)
    _feed(fixed, events)
    return Replay(
        allocated_peak=plain.allocated_peak,
        reserved_peak=plain.reserved_peak,
        needed=smallest_cap(events, plain.allocated_peak),
        peak_at=peak_at,
        allocated_peak_fixed=fixed.allocated_peak,
        reserved_peak_fixed=fixed.reserved_peak,
    )


def peaks(events: Sequence[Event], *, expandable: bool = True) -> tuple[int, int]:
    """The most that is in use and the most that is reserved at once, without a limit."""
    allocator = CachingAllocator(expandable)
    _feed(allocator, events)
    return allocator.allocated_peak, allocator.reserved_peak


def runs_under(events: Iterable[Event], cap: int, *, expandable: bool = True) -> bool:
    """Whether the events succeed under a limit of `cap` bytes: one replay, no search."""
    return _shortfall(tuple(events), cap, expandable) == 0


class OverCap(Exception):
    """A request went beyond the limit although everything free was given back first.

    Args:
        wanted: The limit that would have let this request through.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__(f"a limit of {wanted} bytes would have been needed")
        self.wanted = wanted


def round_size(size: int) -> int:
    """The size of the block that a request gets."""
    return -(-size // ROUNDING) * ROUNDING or ROUNDING


def segment_size(size: int) -> int:
    """What a rounded request that fits nowhere counts against the limit; with fixed segments, also what it takes."""
    if size <= SMALL_LIMIT:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING


class Block:
    """A range of addresses that is in use, free, or not backed by memory, between its neighbours in a segment."""

    __slots__ = ("address", "next", "previous", "size", "small", "state")

    def __init__(self, address: int, size: int, small: bool, state: int) -> None:
        self.address = address
        self.size = size
        self.small = small
        self.state = state
        self.previous: Block | None = None
        self.next: Block | None = None


class CachingAllocator:
    """The allocator: hands blocks out, takes them back, and counts.

    Args:
        expandable: Expandable segments; False for fixed ones.
        cap: The limit on what may be held, in bytes; None for no limit.
    """

    def __init__(self, expandable: bool = True, cap: int | None = None) -> None:
        kind = _ExpandablePool if expandable else _FixedPool
        self.pools: tuple[_Pool, _Pool] = (kind(small=True), kind(small=False))
        self.cap = cap
        self.allocated = self.allocated_peak = 0
        self.reserved = self.reserved_peak = 0
        self.num_flushes = 0  # how often everything free was given back

    def malloc(self, size: int) -> Block:
        """A block of at least `size` bytes.

        Raises:
            OverCap: The limit does not allow it.
        """
        size = round_size(size)
        pool = self.pools[0 if size <= SMALL_LIMIT else 1]
        block = pool.take(size) or self._grow(pool, size)
        pool.split(block, size)
        self.allocated += block.size
        if self.allocated > self.allocated_peak:
            self.allocated_peak = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Take a block back; it stays reserved."""
        self.allocated -= block.size
        self.pools[0 if block.small else 1].give(block)

    def _grow(self, pool: "_Pool", size: int) -> Block:
        # torch checks the whole size of the request, also where a part of it is there already
        counted = segment_size(size)
        if self.cap is not None and self.reserved + counted > self.cap:
            self.num_flushes += 1
            self.reserved -= sum(pool.release() for pool in self.pools)
            if self.reserved + counted > self.cap:
                raise OverCap(self.reserved + counted)
        block, added = pool.grow(size)
        self.reserved += added
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
        return block


class _Blocks:
    """The free blocks of a pool, in the order of size, then address."""

    def __init__(self, small: bool, smallest_rest: int) -> None:
        self.small = small
        self.free: list[tuple[int, int]] = []
        self._at: dict[int, Block] = {}  # the free blocks by address
        self._smallest_rest = smallest_rest

    def take(self, size: int) -> Block | None:
        """The smallest free block that is large enough, in use from now on."""
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        block = self._at.pop(self.free.pop(index)[1])
        block.state = _USED
        return block

    def split(self, block: Block, size: int) -> None:
        """Leave `size` bytes in a block that is in use; the rest becomes free, unless it is too little."""
        rest_size = block.size - size
        if rest_size >= self._smallest_rest:
            rest = self._cut(block, size, _FREE)
            self._at[rest.address] = rest
            insort(self.free, (rest_size, rest.address))

    def give(self, block: Block) -> None:
        """Make a block free, and one with free neighbours."""
        block.state = _FREE
        other = block.previous
        if other is not None and other.state == _FREE:
            self._forget(other)
            block.address = other.address
            block.size += other.size
            block.previous = other.previous
            if other.previous is not None:
                other.previous.next = block
        other = block.next
        if other is not None and other.state == _FREE:
            self._forget(other)
            block.size += other.size
            block.next = other.next
            if other.next is not None:
                other.next.previous = block
        self._at[block.address] = block
        insort(self.free, (block.size, block.address))

    def _forget(self, block: Block) -> None:
        """Take a block off the list of free ones."""
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self._at[block.address]

    def _cut(self, block: Block, size: int, state: int) -> Block:
        """Shorten a block to `size`; the rest of it becomes its next neighbour, which is on no list yet."""
        rest = Block(block.address + size, block.size - size, self.small, state)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        return rest


class _FixedPool(_Blocks):
    """A pool of separate segments."""

    def __init__(self, small: bool) -> None:
        super().__init__(small, smallest_rest=ROUNDING if small else SMALL_LIMIT + 1)
        self._next_address = 0

    def grow(self, size: int) -> tuple[Block, int]:
        """A new segment as one block in use, and the bytes that it takes."""
        block = Block(self._next_address, segment_size(size), self.small, _USED)
        self._next_address += block.size
        return block, block.size

    def release(self) -> int:
        """Give back the segments that are free as a whole; their bytes."""
        blocks = [self._at[address] for _, address in self.free]
        whole = [block for block in blocks if block.previous is None and block.next is None]
        for block in whole:
            self._forget(block)
        return sum(block.size for block in whole)


class _ExpandablePool(_Blocks):
    """A pool that is one range of addresses, backed page by page."""

    def __init__(self, small: bool) -> None:
        super().__init__(small, smallest_rest=ROUNDING)
        self._page = SMALL_SEGMENT if small else LARGE_SEGMENT
        self._unbacked = [Block(0, _ADDRESSES, small, _UNBACKED)]  # by address; never adjacent to each other

    def take(self, size: int) -> Block | None:
        """The smallest free block that is large enough; one that can grow counts with what it can grow to."""
        free = self.free
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self._at[free[index][1]]
        while index + 1 < len(free) and block.next is not None and block.next.state == _UNBACKED:
            larger = self._at[free[index + 1][1]]
            if _reach(larger) >= _reach(block):
                break
            index, block = index + 1, larger
        del free[index]
        del self._at[block.address]
        block.state = _USED
        return block

    def grow(self, size: int) -> tuple[Block, int]:
        """A block in use of at least `size` bytes at the lowest address that has room, and the bytes newly backed."""
        block, added = self._room(size), 0
        if block.state == _UNBACKED:
            added += self._back(block, min(size, block.size))
        while block.size < size:
            following = block.next
            assert following is not None  # _room counted it
            added += self._back(following, min(size - block.size, following.size))
            block = following
        self._forget(block)
        block.state = _USED
        return block, added

    def release(self) -> int:
        """Give back every page that is free as a whole; their bytes."""
        large_enough = self.free[bisect_left(self.free, (self._page, 0)) :]
        return sum(self._unback(self._at[address]) for _, address in large_enough)

    def _room(self, size: int) -> Block:
        """The first block, free or not backed, from which on `size` bytes are not in use."""
        for unbacked in self._unbacked:
            start = unbacked.previous
            first = start if start is not None and start.state == _FREE else unbacked
            room = 0
            block: Block | None = first
            while room < size and block is not None and block.state != _USED:
                room += block.size
                block = block.next
            if room >= size:
                return first
        raise AssertionError("the range of addresses is used up")

    def _back(self, block: Block, size: int) -> int:
        """Back the first pages of a block, which becomes free and one with its free neighbours; their bytes."""
        added = -(-size // self._page) * self._page
        index = bisect_left(self._unbacked, block.address, key=_address)
        if added < block.size:
            self._unbacked[index] = self._cut(block, added, _UNBACKED)
        else:
            del self._unbacked[index]
        self.give(block)
        return added

    def _unback(self, block: Block) -> int:
        """Take the pages away that lie within a free block; their bytes."""
        begin = -(-block.address // self._page) * self._page
        end = (block.address + block.size) // self._page * self._page
        if begin >= end:
            return 0
        self._forget(block)
        if end < block.address + block.size:
            self._list(self._cut(block, end - block.address, _FREE))
        if begin > block.address:
            unbacked = self._cut(block, begin - block.address, _UNBACKED)
            self._list(block)
        else:
            unbacked = block
            unbacked.state = _UNBACKED
        self._join_unbacked(unbacked)
        return end - begin

    def _list(self, block: Block) -> None:
        self._at[block.address] = block
        insort(self.free, (block.size, block.address))

    def _join_unbacked(self, block: Block) -> None:
        """Put a block among the unbacked ones, one with its neighbours of that kind."""
        index = bisect_left(self._unbacked, block.address, key=_address)
        before, after = block.previous, block.next
        if after is not None and after.state == _UNBACKED:
            del self._unbacked[index]
            block.size += after.size
            block.next = after.next
            if after.next is not None:
                after.next.previous = block
        if before is not None and before.state == _UNBACKED:
            before.size += block.size
            before.next = block.next
            if block.next is not None:
                block.next.previous = before
        else:
            self._unbacked.insert(index, block)


_Pool = _FixedPool | _ExpandablePool


def _address(block: Block) -> int:
    return block.address


def _reach(block: Block) -> int:
    """What a block can grow to."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == _UNBACKED else 0)


def _feed(allocator: CachingAllocator, events: Sequence[Event]) -> int:
    """Let an allocator serve the events; the index of the one that reached the peak."""
    held: dict[int, Block] = {}
    peak, peak_at = 0, -1
    for index, (storage, size) in enumerate(events):
        if size:
            held[storage] = allocator.malloc(size)
            if allocator.allocated > peak:
                peak, peak_at = allocator.allocated, index
        else:
            allocator.free(held.pop(storage))
    return peak_at


def _shortfall(events: Sequence[Event], cap: int, expandable: bool = True) -> int:
    """0 where the events succeed under the limit, else the limit that would have let the failing request through."""
    try:
        _feed(CachingAllocator(expandable, cap), events)
    except OverCap as failure:
        return failure.wanted
    return 0


def smallest_cap(events: Sequence[Event], allocated_peak: int, *, expandable: bool = True) -> int:
    """The smallest limit that the events run under: one that succeeds, where one step less fails.

    A failure says which limit would have let its request through: the next one to try, unless the strides, which
    double, lead further. What lies between the first success and the last failure is halved until one step is left.
    """
    fails = (allocated_peak - 1) // CAP_STEP  # less than what is in use at once cannot succeed
    runs, stride = fails + 1, 1
    while wanted := _shortfall(events, runs * CAP_STEP, expandable):
        fails, runs, stride = runs, max(runs + stride, -(-wanted // CAP_STEP)), 2 * stride
    while runs - fails > 1:
        middle = (fails + runs) // 2
        if _shortfall(events, middle * CAP_STEP, expandable):
            fails = middle
        else:
            runs = middle
    return runs * CAP_STEP
