"""Split sequences over the ranks: consecutive parts in rank order, whose sizes differ by at most one."""

from collections.abc import Mapping
from typing import Any

import torch


def split_bounds(num_items: int, rank: int, num_processes: int) -> tuple[int, int]:
    """Return start and end of the part of `rank`; a remainder is spread over the first ranks, one item each."""
    size, num_larger = divmod(num_items, num_processes)
    start = rank * size + min(rank, num_larger)
    return start, start + size + (rank < num_larger)


def split_for_rank(inputs: Any, rank: int, num_processes: int, apply_padding: bool = False) -> Any:
    """Return the part of `rank` of a list, tuple, tensor or dataset, or of each list in a mapping.

    Args:
        inputs: The sequence to split.
        rank: The rank whose part is returned.
        num_processes: Number of parts.
        apply_padding: Whether to repeat the last item of a shorter part, so that all parts have the same length.
    """
    if isinstance(inputs, Mapping):
        lengths = {len(value) for value in inputs.values()}
        if len(lengths) > 1:
            raise ValueError(f"the values of a dict have different lengths: {sorted(lengths)}")
        return {key: split_for_rank(value, rank, num_processes, apply_padding) for key, value in inputs.items()}
    if not hasattr(inputs, "__len__") or not hasattr(inputs, "__getitem__"):
        raise TypeError(f"a {type(inputs).__name__} cannot be split; pass a list, tuple, tensor or dict of these")
    start, end = split_bounds(len(inputs), rank, num_processes)
    is_short = end - start < -(-len(inputs) // num_processes)
    last = (end if end > start else len(inputs)) - 1
    repeated = [last] if apply_padding and is_short else []
    if hasattr(inputs, "column_names") and hasattr(inputs, "select"):  # slicing a datasets.Dataset returns columns
        return inputs.select([*range(start, end), *repeated])
    # Raised on every rank, also on those whose part needs no padding.
    if apply_padding and not isinstance(inputs, list | tuple | str | torch.Tensor):
        raise TypeError(f"a {type(inputs).__name__} cannot be padded; pass a list, tuple, tensor or dataset")
    part = inputs[start:end]
    if not repeated:
        return part
    filler = inputs[last : last + 1]
    return torch.cat([part, filler]) if isinstance(inputs, torch.Tensor) else part + filler
