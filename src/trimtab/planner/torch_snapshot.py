"""A predicted step as the dictionary of `torch.cuda.memory._snapshot`, for torch's memory viewer.

Addresses are those of the allocator model, so the viewer also shows predicted fragmentation.
"""

from collections.abc import Iterable
from typing import Any

from trimtab.planner.allocator import Block, CachingAllocator, is_backed, is_used
from trimtab.planner.anatomy import part_of
from trimtab.planner.memory import Prediction
from trimtab.planner.timeline import name_of
from trimtab.planner.trace.recorder import Trace

_BASES = {True: 0x7F0000000000, False: 0x7E0000000000}  # addresses of the small and the large pool


def torch_snapshot(prediction: Prediction, times: list[float]) -> dict[str, Any]:
    """Replay a prediction on the allocator model.

    Args:
        prediction: The prediction; for captured steps, of the capture.
        times: The time of each event of its trace, in seconds.

    Returns:
        Segments at the end of the step, and the trace of one device, with a module instead of each stack trace.
    """
    trace = prediction.trace
    allocator = CachingAllocator(expandable=prediction.expandable)
    held: dict[int, Block] = {}
    addresses: dict[int, int] = {}
    entries: list[dict[str, Any]] = []
    for (storage, size), seconds in zip(trace.events, times, strict=True):
        if size:
            held[storage] = allocator.malloc(size)
            addresses[storage] = _address(held[storage])
        actions = ("alloc",) if size else ("free_requested", "free_completed")
        entries += [
            {
                "action": action,
                "addr": addresses[storage],
                "size": trace.births[storage].size,
                "stream": 0,
                "time_us": round(seconds * 1e6),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": _frames(trace, storage),
            }
            for action in actions
        ]
        if not size:
            allocator.free(held.pop(storage))
    blocks = (*held.values(), *(block for pool in allocator.pools for block in pool.free_blocks()))
    storages = {id(block): storage for storage, block in held.items()}
    return {
        "segments": [
            _segment(chain, trace, storages, is_expandable=prediction.expandable) for chain in _chains(blocks)
        ],
        "device_traces": [entries],
        "allocator_settings": {"expandable_segments": prediction.expandable},
        "external_annotations": [],
    }


def _address(block: Block) -> int:
    return _BASES[block.small] + block.address


def _frames(trace: Trace, storage: int) -> list[dict[str, Any]]:
    """What the viewer shows for a block: the operation and, as callers, the module and the part of the anatomy."""
    birth = trace.births[storage]
    texts = (birth.op or birth.part, name_of(trace, storage), part_of(trace, storage))
    return [{"name": text, "filename": "trimtab", "line": 0} for text in texts if text]


def _chains(blocks: Iterable[Block]) -> list[list[Block]]:
    """Adjacent blocks that are backed by memory, by address: the segments."""
    heads: dict[int, Block] = {}
    for block in blocks:
        while block.previous is not None and is_backed(block.previous):
            block = block.previous
        heads[_address(block)] = block
    chains = []
    for _, head in sorted(heads.items()):
        chain, following = [head], head.next
        while following is not None and is_backed(following):
            chain.append(following)
            following = following.next
        chains.append(chain)
    return chains


def _segment(chain: list[Block], trace: Trace, storages: dict[int, int], *, is_expandable: bool) -> dict[str, Any]:
    used = sum(block.size for block in chain if is_used(block))
    requested = sum(trace.births[storages[id(block)]].size for block in chain if is_used(block))
    return {
        "device": 0,
        "address": _address(chain[0]),
        "total_size": sum(block.size for block in chain),
        "allocated_size": used,
        "active_size": used,
        "requested_size": requested,
        "stream": 0,
        "segment_type": "small" if chain[0].small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": is_expandable,
        "frames": [],
        "blocks": [_described(block, trace, storages) for block in chain],
    }


def _described(block: Block, trace: Trace, storages: dict[int, int]) -> dict[str, Any]:
    known = {"address": _address(block), "size": block.size}
    if not is_used(block):
        return {**known, "requested_size": 0, "state": "inactive", "frames": []}
    storage = storages[id(block)]
    frames = _frames(trace, storage)
    return {**known, "requested_size": trace.births[storage].size, "state": "active_allocated", "frames": frames}
