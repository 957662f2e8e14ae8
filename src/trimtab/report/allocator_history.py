"""The allocations and releases of a step as CUDA's allocator itself records them.

Its history is complete: every block in use has an entry, or was in use when recording started. The profiler knows which
operator a block belongs to, but misses releases; `with_lifetimes` combines both.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.report.profiled_blocks import Block, Profile

_ROUNDING = 512
_MOST_REMAINDER = 2**20  # bytes that the allocator leaves in a block instead of splitting them off
_FREED = ("free_requested", "free")  # the counter of allocated bytes is reduced at the request


@dataclass(frozen=True)
class History:
    """The record of the allocator.

    Attributes:
        before: Bytes of each block that was in use at the start, by address.
        entries: Its trace entries.
        snapshot: The result of `torch.cuda.memory._snapshot` at the end.
    """

    before: Mapping[int, int]
    entries: Sequence[Mapping[str, Any]]
    snapshot: Mapping[str, Any]


class AllocatorHistory:
    """Record the allocations and releases of a CUDA device.

    Args:
        device: The device.
        with_stacks: Whether to record the Python stack of each allocation, for torch's viewer.
    """

    def __init__(self, device: torch.device, *, with_stacks: bool = False) -> None:
        self._device = torch.cuda.current_device() if device.index is None else device.index
        self._context = "alloc" if with_stacks else None
        self._before: dict[int, int] = {}

    def start(self) -> None:
        """Start recording; an earlier record is discarded."""
        torch.cuda.memory._record_memory_history("all", context=self._context, stacks="python", clear_history=True)
        self._before = blocks_in_use(torch.cuda.memory._snapshot(), self._device)

    def stop(self) -> History:
        """Stop recording, and return the record."""
        snapshot = torch.cuda.memory._snapshot()
        torch.cuda.memory._record_memory_history(None)
        return History(self._before, snapshot["device_traces"][self._device], snapshot)


def blocks_in_use(snapshot: Mapping[str, Any], device: int) -> dict[int, int]:
    """The bytes of each block in use in a snapshot, by address."""
    found: dict[int, int] = {}
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                found[address] = block["size"]
            address += block["size"]
    return found


def with_lifetimes(profile: Profile, history: History, known: Mapping[int, Block]) -> Profile:
    """Combine the profiler's information about blocks with the lifetimes recorded by the allocator.

    Args:
        profile: The profiler's view of the step.
        history: The allocator's view of the same step.
        known: Blocks with a name that existed before, by address.

    Returns:
        Every block that was in use at any time, in indices of the history.
    """
    blocks, living, times_ns = _lives(history)
    for block in blocks:
        if block.born < 0 and block.address in known:
            block.name_as(known[block.address])
    positions = _describe(blocks, profile, times_ns)

    marks = []
    for mark, stage in profile.marks:  # before the first block that was allocated after it
        index = bisect_left(positions, mark, key=lambda pair: pair[0])
        marks.append((positions[index][1] if index < len(positions) else len(times_ns), stage))
    return Profile(blocks, marks, times_ns, living)


def _lives(history: History) -> tuple[list[Block], dict[int, Block], list[int]]:
    """The blocks of a history, those alive at its end by address, and the time of each change."""
    living = {address: Block(size, -1, address=address) for address, size in history.before.items()}
    blocks, times_ns = list(living.values()), list[int]()
    for entry in history.entries:
        action, address = entry["action"], entry.get("addr")
        if action == "alloc":
            assert address is not None
            size = -(-int(entry["size"]) // _ROUNDING) * _ROUNDING or _ROUNDING
            if address in living:  # its release is not in the history
                living[address].died = len(times_ns)
            living[address] = Block(size, len(times_ns), address=address)
            blocks.append(living[address])
        elif action in _FREED and address in living:
            living.pop(address).died = len(times_ns)
        else:
            continue
        times_ns.append(1000 * int(entry.get("time_us", len(times_ns))))
    return blocks, living, times_ns


def _describe(blocks: Sequence[Block], profile: Profile, times_ns: Sequence[int]) -> list[tuple[int, int]]:
    """Copy the profiler's information to the blocks of the history; return pairs of matching positions, in order."""
    allocated: dict[int, list[Block]] = {}
    for block in blocks:
        if block.born >= 0:
            allocated.setdefault(block.address, []).append(block)
    seen: dict[int, list[Block]] = {}
    for block in profile.blocks:
        if block.born >= 0:
            seen.setdefault(block.address, []).append(block)
    pairs = []
    for address, found in seen.items():
        for source, block in _matches(found, allocated.get(address, []), profile.times_ns, times_ns):
            if 0 < source.size - block.size <= _MOST_REMAINDER:
                block.size = source.size
            block.part, block.exact_size, block.op, block.name = source.part, source.exact_size, source.op, source.name
            block.is_recomputed, block.is_wide = source.is_recomputed, source.is_wide
            pairs.append((source.born, block.born))
    return sorted(pairs)


def _matches(
    seen: Sequence[Block], allocated: Sequence[Block], seen_ns: Sequence[int], allocated_ns: Sequence[int]
) -> list[tuple[Block, Block]]:
    """Pairs of the same block at one address: in order or, if the profiler missed some, by the nearest time."""
    if len(seen) == len(allocated):
        return list(zip(seen, allocated, strict=True))
    pairs, first = [], 0
    for number, source in enumerate(seen):
        last = len(allocated) - (len(seen) - number - 1)  # leave one for each block that follows
        candidates = range(first, max(first, last))
        best = min(
            candidates, key=lambda at: abs(allocated_ns[allocated[at].born] - seen_ns[source.born]), default=None
        )
        if best is None:
            break
        pairs.append((source, allocated[best]))
        first = best + 1
    return pairs
