"""How things are shared out: consecutive parts in the order of ranks, whose sizes differ by one at most."""

from collections.abc import Mapping
from typing import Any

import torch


def share_bounds(num_items: int, rank: int, num_processes: int) -> tuple[int, int]:
    """Where the part of `rank` begins and ends; the first ranks have one item more where it does not divide."""
    size, num_larger = divmod(num_items, num_processes)
    start = rank * size + min(rank, num_larger)
    return start, start + size + (rank < num_larger)


def share_of(inputs: Any, rank: int, num_processes: int, apply_padding: bool = False) -> Any:
    """The part of `rank` of a list, tuple, tensor or dataset, or of each list in a mapping.

    Args:
        inputs: What is shared out.
        rank: Whose part.
        num_processes: How many parts.
        apply_padding: Repeat the last item of a part that is short, so that all are of one length.
    """
    if isinstance(inputs, Mapping):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise ValueError(f"the values of a dict have different lengths: {sorted(lengths)}")
        return {key: share_of(value, rank, num_processes, apply_padding) for key, value in inputs.items()}
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(f"a {type(inputs).__name__} cannot be shared out; a list, tuple, tensor or dict of these can")
    start, end = share_bounds(len(inputs), rank, num_processes)
    is_short = end - start < -(-len(inputs) // num_processes)
    last = (end if end > start else len(inputs)) - 1
    repeated = [last] if apply_padding and is_short else []
    if hasattr(inputs, "column_names") and hasattr(inputs, "select"):  # a slice of a datasets.Dataset gives columns
        return inputs.select([*range(start, end), *repeated])
    if apply_padding and not isinstance(inputs, list | tuple | str | torch.Tensor):  # also where this part is full
        raise TypeError(f"a {type(inputs).__name__} cannot be padded; a list, tuple, tensor or dataset can")
    part = inputs[start:end]
    if not repeated:
        return part
    filler = inputs[last : last + 1]
    return torch.cat([part, filler]) if isinstance(inputs, torch.Tensor) else part + filler
