"""Collective operations that need no engine: `gather`, `broadcast`, `reduce` and others."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.accelerate.shared_state import PartialState
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import map_tensors
from trimtab.engine.placement import to_device
from trimtab.engine.sharding import joined_rows
from trimtab.errors import RecipeError

T = TypeVar("T")


class DistributedOperationException(Exception):
    """Raised with `PartialState().debug = True` when processes pass tensors of different shapes."""


def gather(tensor: T) -> T:
    """Concatenate the tensors of all processes."""
    return PartialState().world.gather(tensor)


def gather_object(object: Any) -> Any:
    """Concatenate the lists of all processes; with one process, return the object itself."""
    state = PartialState()
    return state.world.gather_object(object) if state.use_distributed else object


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Copy the tensors of one process to all, in place."""
    state = PartialState()
    _check("broadcast", tensor, state)
    if not state.use_distributed:
        return tensor

    def send(own: torch.Tensor) -> torch.Tensor:
        dist.broadcast(own, src=from_process)
        return own

    with state.world.exchanging("broadcast"):
        received: T = map_tensors(send, tensor)
    return received


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Copy the objects of one process into the lists of all."""
    state = PartialState()
    if state.use_distributed:
        with state.world.exchanging("broadcast"):
            dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """Reduce tensors over the processes: "mean", "sum" or "max"."""
    state = PartialState()
    _check("reduce", tensor, state)
    return state.world.reduce(tensor, reduction, scale)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Pad tensors to the largest size on any process."""
    state = PartialState()
    _check("pad_across_processes", tensor, state)
    return state.world.pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Copy the tensor of rank 0 to the devices of all processes; the other ranks may pass None."""
    state = PartialState()
    host = None if tensor is None else tensor.cpu()
    copied: torch.Tensor = state.world.broadcast_object(host)  # type: ignore[assignment]
    return copied.to(state.device)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Move all tensors in a batch to a device; `skip_keys` of a dict are not moved."""
    keys = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    moved = to_device(tensor, torch.device(device), non_blocking)
    return {**moved, **{key: tensor[key] for key in keys & set(tensor)}} if keys and isinstance(tensor, dict) else moved


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Concatenate batches of the same structure."""
    if dim == 0:
        return joined_rows(list(data))
    if not all(isinstance(part, torch.Tensor) for part in data):
        raise RecipeError(f"concatenate(dim={dim}) supports tensors only", "call it for each tensor")
    return torch.cat(data, dim=dim)


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """Return the model without the data-parallel wrapper."""
    if not keep_fp32_wrapper or not keep_torch_compile:
        raise RecipeError(
            "extract_model_from_parallel removes the data-parallel wrapper only",
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
        )
    return model.module if isinstance(model, DataParallel) else model


def is_peft_model(model: Any) -> bool:
    """Whether a model, or the one inside its data-parallel wrapper, is PEFT's."""
    from peft import PeftModel

    return isinstance(extract_model_from_parallel(model), PeftModel)


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return tqdm's progress bar, which by default only the main process of each host shows."""
    from tqdm.auto import tqdm as bar

    hidden = main_process_only and PartialState().local_process_index > 0
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable") or hidden})


@contextlib.contextmanager
def patch_environment(**variables: Any) -> Iterator[None]:
    """Set environment variables, with names in upper case, inside the context."""
    before = dict(os.environ)
    os.environ.update({name.upper(): str(value) for name, value in variables.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _check(verb: str, value: Any, state: Any) -> None:
    """In debug mode, compare shapes across processes first: a mismatch would hang or give wrong values."""
    if not state.debug or not state.use_distributed:
        return
    shapes: list[tuple[int, ...]] = []
    map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)), value)
    everyone = state.world.all_gather_object(shapes)
    if verb == "pad_across_processes":  # sizes may differ, the number of dimensions may not
        differs = any([len(s) for s in theirs] != [len(s) for s in shapes] for theirs in everyone)
    else:
        differs = any(theirs != shapes for theirs in everyone)
    if differs:
        shown = "\n".join(f"  - process {rank}: {theirs}" for rank, theirs in enumerate(everyone))
        raise DistributedOperationException(f"{verb}: the processes passed tensors of different shapes:\n{shown}")
