"""Batches of any structure, for captured micro-batches: nested mappings, lists and tuples of tensors and values."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def size_of(batch: Any) -> Any:
    """The properties of a batch that a graph depends on: structure, sizes of tensors, and all other values."""
    if isinstance(batch, torch.Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, size_of(value)) for key, value in _sorted_items(batch))
    if isinstance(batch, list | tuple):
        return type(batch), tuple(map(size_of, batch))
    return type(batch), batch


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in the same order for all batches of one size."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for _, value in _sorted_items(batch):
            yield from tensors_of(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from tensors_of(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Any) -> Any:
    """Apply a function to every tensor of a batch; containers are copied and keep their type."""
    if isinstance(batch, torch.Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        made: Any = copy.copy(batch)  # a constructor may expect other arguments, for example that of defaultdict
        for key, value in batch.items():
            made[key] = map_tensors(function, value)
        return made
    if isinstance(batch, list | tuple):
        values = [map_tensors(function, value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def _sorted_items(batch: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(batch.items(), key=lambda item: str(item[0]))
