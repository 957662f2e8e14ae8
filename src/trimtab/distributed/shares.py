"""How things are shared out: consecutive parts in the order of ranks, whose sizes differ by one at most."""

from collections.abc import Sequence
from typing import Any

import torch


def share_bounds(num_items: int, rank: int, num_processes: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends; the first ranks have one item more where it does not divide."""
    size, num_larger = divmod(num_items, num_processes)
    start = rank * size + min(rank, num_larger)
    return start, start + size + (rank < num_larger)


def share_of(inputs: Any, rank: int, num_processes: int, apply_padding: bool = False) -> Any:
    """The part of `rank` of a list, tuple, tensor, or of each list in a dict.

    Args:
        inputs: What is shared out.
        rank: Whose part.
        num_processes: How many parts.
        apply_padding: Repeat the last item of a part that is short, so that all are of one length.
    """
    if isinstance(inputs, dict):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise ValueError(f"the values of a dict have different lengths: {sorted(lengths)}")
        return {key: share_of(value, rank, num_processes, apply_padding) for key, value in inputs.items()}
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(f"a {type(inputs).__name__} cannot be shared out; a list, tuple, tensor or dict of these can")
    start, end = share_bounds(len(inputs), rank, num_processes)
    part = inputs[start:end]
    longest = -(-len(inputs) // num_processes)
    if not apply_padding or end - start == longest or not len(inputs):
        return part
    filler = inputs[end - 1 : end] if end > start else inputs[-1:]
    return _joined(part, filler)


def _joined(part: Any, filler: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return torch.cat([part, filler])
    assert isinstance(part, Sequence)
    return part + filler
