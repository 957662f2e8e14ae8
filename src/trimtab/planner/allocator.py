"""Replay the allocations and frees of a step on a model of CUDA's caching allocator (torch 2.11 to 2.13).

The model covers one stream. Sizes are rounded up to 512 B. Requests up to 1 MiB and larger ones use two separate pools.
A request takes the smallest free block that is large enough; the remainder is split off, and adjacent free blocks are
merged. Memory is obtained in one of two ways:

- fixed segments, torch's default: a request that no free block can serve allocates a new segment (2 MiB for small
  requests, 20 MiB below 10 MiB, else its size rounded up to 2 MiB). Larger requests cannot use the remainders.
- expandable segments: each pool is one range of addresses, backed on demand by pages of 2 MiB (small) or 20 MiB
  (large). A request that no free block can serve is placed at the lowest address with enough free or unbacked space.

With a limit, a request that would exceed it first releases all free memory (whole segments or whole pages), then
retries once.
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
OWN_SEGMENT = 10 * MIB  # requests of at least this size get a segment of their own size
SEGMENT_ROUNDING = 2 * MIB
CAP_STEP = 16 * MIB  # resolution of the search for the smallest limit
EMPTY_CACHE = Event(-1, 0)  # not a storage: releases all free memory, like torch.cuda.empty_cache

_ADDRESSES = 2**60  # address range of an expandable segment, practically unlimited
_USED, _FREE, _UNBACKED = range(3)


@dataclass(frozen=True)
class Replay:
    """Memory statistics of a sequence of allocations and frees, in bytes.

    Attributes:
        allocated_peak: Peak bytes in use, as `max_memory_allocated` reports them with expandable segments.
        reserved_peak: Peak bytes held by the allocator, with expandable segments and no limit.
        needed: The smallest limit, in steps of 16 MiB, under which all requests succeed with expandable segments.
        peak_at: Index of the first event that reached `allocated_peak`; -1 without events.
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
    """Replay events with expandable and with fixed segments, and find the smallest limit that they run under.

    Args:
        events: Allocations and frees in chronological order; a storage is freed at most once.
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
    """Peak allocated and peak reserved bytes, without a limit."""
    allocator = CachingAllocator(expandable)
    _feed(allocator, events)
    return allocator.allocated_peak, allocator.reserved_peak


def runs_under(events: Iterable[Event], cap: int, *, expandable: bool = True) -> bool:
    """Whether the events succeed under a limit of `cap` bytes; a single replay."""
    return _shortfall(tuple(events), cap, expandable) == 0


class OverCap(Exception):
    """A request exceeded the limit even after all free memory was released.

    Args:
        wanted: The limit that this request needs.
    """

    def __init__(self, wanted: int) -> None:
        super().__init__(f"needs a limit of {wanted} bytes")
        self.wanted = wanted


def round_size(size: int) -> int:
    """Return the block size for a request."""
    return -(-size // ROUNDING) * ROUNDING or ROUNDING


def segment_size(size: int) -> int:
    """Bytes that a rounded request without a free block counts against the limit; the size of a fixed segment."""
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
    """A caching allocator with statistics.

    Args:
        expandable: Whether to use expandable segments instead of fixed ones.
        cap: Limit of the reserved bytes; None means no limit.
    """

    def __init__(self, expandable: bool = True, cap: int | None = None) -> None:
        kind = _ExpandablePool if expandable else _FixedPool
        self.pools: tuple[_Pool, _Pool] = (kind(small=True), kind(small=False))
        self.cap = cap
        self.allocated = self.allocated_peak = 0
        self.reserved = self.reserved_peak = 0
        self.num_flushes = 0  # how often all free memory was released

    def malloc(self, size: int) -> Block:
        """Allocate a block of at least `size` bytes.

        Raises:
            OverCap: The request exceeds the limit.
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
        """Free a block; its memory stays reserved."""
        self.allocated -= block.size
        self.pools[0 if block.small else 1].give(block)

    def empty_cache(self) -> None:
        """Release all free memory: whole segments or whole pages."""
        self.reserved -= sum(pool.release() for pool in self.pools)

    def _grow(self, pool: "_Pool", size: int) -> Block:
        # torch checks the whole size of the request, even if a part of it is already backed
        counted = segment_size(size)
        if self.cap is not None and self.reserved + counted > self.cap:
            self.num_flushes += 1
            self.empty_cache()
            if self.reserved + counted > self.cap:
                raise OverCap(self.reserved + counted)
        block, added = pool.grow(size)
        self.reserved += added
        if self.reserved > self.reserved_peak:
            self.reserved_peak = self.reserved
        return block


class _Blocks:
    """The free blocks of a pool, sorted by size, then address."""

    def __init__(self, small: bool, smallest_rest: int) -> None:
        self.small = small
        self.free: list[tuple[int, int]] = []
        self._at: dict[int, Block] = {}  # the free blocks by address
        self._smallest_rest = smallest_rest

    def take(self, size: int) -> Block | None:
        """Take the smallest free block that is large enough; None if there is none."""
        index = bisect_left(self.free, (size, 0))
        if index == len(self.free):
            return None
        block = self._at.pop(self.free.pop(index)[1])
        block.state = _USED
        return block

    def split(self, block: Block, size: int) -> None:
        """Shrink a used block to `size` bytes and free the remainder, unless it is too small to split off."""
        rest_size = block.size - size
        if rest_size >= self._smallest_rest:
            rest = self._cut(block, size, _FREE)
            self._at[rest.address] = rest
            insort(self.free, (rest_size, rest.address))

    def give(self, block: Block) -> None:
        """Free a block and merge it with free neighbours."""
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

    def free_blocks(self) -> list[Block]:
        """All free blocks that are backed by memory."""
        return list(self._at.values())

    def _forget(self, block: Block) -> None:
        """Remove a block from the free list."""
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self._at[block.address]

    def _cut(self, block: Block, size: int, state: int) -> Block:
        """Split a block after `size` bytes; return the second part, which is on no list yet."""
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
        """Allocate a segment as one used block; return it and its bytes."""
        block = Block(self._next_address, segment_size(size), self.small, _USED)
        self._next_address += block.size
        return block, block.size

    def release(self) -> int:
        """Release all segments that are entirely free; return their bytes."""
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
        """Take the smallest free block that is large enough; a block that can grow is compared by its possible size."""
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
        """Allocate `size` bytes or more at the lowest possible address; return the block and the newly backed bytes."""
        block, added = self._room(size), 0
        if block.state == _UNBACKED:
            added += self._back(block, min(size, block.size))
        while block.size < size:
            following = block.next
            assert following is not None  # _room has already counted it
            added += self._back(following, min(size - block.size, following.size))
            block = following
        self._forget(block)
        block.state = _USED
        return block, added

    def release(self) -> int:
        """Release all pages that are entirely free; return their bytes."""
        large_enough = self.free[bisect_left(self.free, (self._page, 0)) :]
        return sum(self._unback(self._at[address]) for _, address in large_enough)

    def _room(self, size: int) -> Block:
        """The first free or unbacked block from which `size` contiguous bytes are unused."""
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
        raise AssertionError("the address range is exhausted")

    def _back(self, block: Block, size: int) -> int:
        """Back the first pages of a block, free it and merge it with free neighbours; return the bytes of the pages."""
        added = -(-size // self._page) * self._page
        index = bisect_left(self._unbacked, block.address, key=_address)
        if added < block.size:
            self._unbacked[index] = self._cut(block, added, _UNBACKED)
        else:
            del self._unbacked[index]
        self.give(block)
        return added

    def _unback(self, block: Block) -> int:
        """Unmap the pages that lie entirely within a free block; return their bytes."""
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
        """Add a block to the unbacked list, merged with unbacked neighbours."""
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


def is_used(block: Block) -> bool:
    """Whether a block is in use."""
    return block.state == _USED


def is_backed(block: Block) -> bool:
    """Whether a block is backed by memory."""
    return block.state != _UNBACKED


def _address(block: Block) -> int:
    return block.address


def _reach(block: Block) -> int:
    """The size that a block can grow to."""
    following = block.next
    return block.size + (following.size if following is not None and following.state == _UNBACKED else 0)


def _feed(allocator: CachingAllocator, events: Sequence[Event]) -> int:
    """Replay events on an allocator; return the index of the event that reached the peak."""
    held: dict[int, Block] = {}
    peak, peak_at = 0, -1
    for index, (storage, size) in enumerate(events):
        if size:
            held[storage] = allocator.malloc(size)
            if allocator.allocated > peak:
                peak, peak_at = allocator.allocated, index
        elif storage == EMPTY_CACHE.storage:
            allocator.empty_cache()
        else:
            allocator.free(held.pop(storage))
    return peak_at


def _shortfall(events: Sequence[Event], cap: int, expandable: bool = True) -> int:
    """Return 0 if the events succeed under the limit, else the limit that the failing request needs."""
    try:
        _feed(CachingAllocator(expandable, cap), events)
    except OverCap as failure:
        return failure.wanted
    return 0


def smallest_cap(events: Sequence[Event], allocated_peak: int, *, expandable: bool = True) -> int:
    """The smallest limit that the events run under, in steps of 16 MiB.

    A failure reports the limit that its request needs. The search tries this limit, or the current one plus a stride
    that doubles each time; then it bisects between the last failure and the first success.
    """
    fails = (allocated_peak - 1) // CAP_STEP  # the limit cannot be less than the peak in use
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
