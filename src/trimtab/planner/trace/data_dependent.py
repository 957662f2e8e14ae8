"""Operations and methods that depend on data, which `meta` tensors lack: they use the known values of a trace.

If values are unknown, a mask counts as set everywhere, which takes the most memory.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from trimtab.planner.trace.cache import run_on_meta
from trimtab.planner.trace.deferred_values import NotKnown
from trimtab.planner.trace.known_values import KnownValues
from trimtab.techniques.base import Patch

aten = torch.ops.aten
Run = Callable[[Any, tuple[Any, ...]], Any]
_INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_, aten._index_put_impl_}
_MASKS = (torch.bool, torch.uint8)


@cache
def depends_on_data(func: Any) -> bool:
    """Whether the result of an operation may depend on data."""
    packet = func._overloadpacket
    return torch.Tag.dynamic_output_shape in func.tags or packet in (*_INDEXING, aten._to_copy, aten.equal)


def run_with_values(values: KnownValues, run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose result depends on data.

    Args:
        values: The known values.
        run: Runs an operation as a GPU's kernel would, and records what it allocates.
        func: The operation.
        args: Its arguments.
        kwargs: Its arguments by name.

    Returns:
        The result, or `NotImplemented` for operations that depend on shapes alone, or on unknown values.
    """
    packet = func._overloadpacket
    if packet in _INDEXING:
        return _index(run, func, args, kwargs)
    if packet is aten.masked_select:
        shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]
        mask = values.of(args[1])
        return args[0].new_empty(math.prod(shape) if mask is None else int(mask.expand(shape).sum()))
    if torch.Tag.dynamic_output_shape in func.tags:
        return _of_known_shape(values, func, args, kwargs)
    if packet is aten._to_copy and kwargs.get("device") == torch.device("cpu") and args[0].is_meta:
        found = values.of(args[0])
        return NotImplemented if found is None else func(found.clone(), **kwargs)
    if packet is aten.equal and all(values.of(tensor) is not None for tensor in args):
        return values.run(func, args, kwargs)
    return NotImplemented


def _of_known_shape(values: KnownValues, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        found = values.run(func, args, kwargs)
    except NotKnown:
        if func._overloadpacket is not aten.nonzero:
            return NotImplemented
        return args[0].new_empty((args[0].dim(), args[0].numel()), dtype=torch.long).t()
    if isinstance(found, torch.Tensor):
        return _like(found, func)
    return type(found)(_like(tensor, func) for tensor in found)


def _like(found: torch.Tensor, func: Any) -> torch.Tensor:
    made = torch.empty_like(found, device="meta", memory_format=torch.contiguous_format)
    is_transposed = func._overloadpacket is aten.nonzero and found.dim() == 2  # on a GPU
    return made.new_empty(made.shape[::-1]).t() if is_transposed else made


def _index(run: Run, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index with the positions at which masks are set; GPUs compute these before they index."""
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.is_meta and index.dtype in _MASKS:
            indices += run(aten.nonzero.default, (index,)).unbind(1)
        else:
            indices.append(index)
    if len(indices) == len(args[1]) and all(mine is theirs for mine, theirs in zip(indices, args[1], strict=True)):
        return NotImplemented
    return run_on_meta(func, (args[0], indices, *args[2:]), kwargs)


def reading_patches(values: KnownValues) -> Iterator[Patch]:
    """Replacements for tensor methods that read data without an operation."""

    def with_data(tensor: torch.Tensor) -> torch.Tensor:
        found = values.of(tensor) if tensor.is_meta else None
        return tensor if found is None else found

    for name in ("tolist", "__format__"):
        method = getattr(torch.Tensor, name)
        yield torch.Tensor, name, lambda tensor, *args, method=method: method(with_data(tensor), *args)
