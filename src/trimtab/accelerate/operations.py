"""Functions over all processes that need no engine: `gather`, `broadcast`, `reduce` and their like."""

from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.accelerate.latest import PartialState
from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import map_tensors
from trimtab.engine.placement import to_device
from trimtab.engine.sharding import joined_rows
from trimtab.errors import RecipeError

T = TypeVar("T")


class DistributedOperationException(Exception):
    """With `PartialState().debug = True`: processes gave tensors that cannot be used together."""


def gather(tensor: T) -> T:
    """Tensors of every process, concatenated."""
    return PartialState().world.gather(tensor)


def gather_object(object: Any) -> Any:
    """Lists of every process, joined; on one process the object itself."""
    state = PartialState()
    return state.world.gather_object(object) if state.use_distributed else object


def broadcast(tensor: T, from_process: int = 0) -> T:
    """Tensors of one process, on every process. They are written where each process has its own."""
    state = PartialState()
    _check("broadcast", tensor, state)
    if not state.use_distributed:
        return tensor

    def sent(own: torch.Tensor) -> torch.Tensor:
        dist.broadcast(own, src=from_process)
        return own

    with state.world.exchanging("broadcast"):
        received: T = map_tensors(sent, tensor)
    return received


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The objects of one process, in the list of every process."""
    state = PartialState()
    if state.use_distributed:
        with state.world.exchanging("broadcast"):
            dist.broadcast_object_list(object_list, src=from_process)
    return object_list


def reduce(tensor: T, reduction: str = "mean", scale: float = 1.0) -> T:
    """Tensors averaged ("mean"), summed ("sum") or maximized ("max") over the processes."""
    state = PartialState()
    _check("reduce", tensor, state)
    return state.world.reduce(tensor, reduction, scale)


def pad_across_processes(tensor: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
    """Tensors padded to the largest size on any process."""
    state = PartialState()
    _check("pad_across_processes", tensor, state)
    return state.world.pad_across_processes(tensor, dim, pad_index, pad_first)


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor of the first process, on the device of every process; the others may have none."""
    state = PartialState()
    host = None if tensor is None else tensor.cpu()
    copied: torch.Tensor = state.world.object_of_first(host)  # type: ignore[assignment]
    return copied.to(state.device)


def send_to_device(tensor: Any, device: Any, non_blocking: bool = False, skip_keys: Any = None) -> Any:
    """Everything in a batch on a device; `skip_keys` of a dict stay where they are."""
    keys = {skip_keys} if isinstance(skip_keys, str) else set(skip_keys or ())
    moved = to_device(tensor, torch.device(device), non_blocking)
    return {**moved, **{key: tensor[key] for key in keys & set(tensor)}} if keys and isinstance(tensor, dict) else moved


def concatenate(data: list[Any], dim: int = 0) -> Any:
    """Batches of one kind as one."""
    if dim == 0:
        return joined_rows(list(data))
    if not all(isinstance(part, torch.Tensor) for part in data):
        raise RecipeError(f"concatenate(dim={dim}) takes tensors alone", "concatenate each tensor by itself")
    return torch.cat(data, dim=dim)


def extract_model_from_parallel(
    model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> torch.nn.Module:
    """The model without its connection to other processes."""
    if not keep_fp32_wrapper or not keep_torch_compile:
        raise RecipeError(
            "extract_model_from_parallel takes off the connection alone",
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)",
        )
    return model.module if isinstance(model, DataParallel) else model


def synchronize_rng_state(rng_type: str | None = None, generator: torch.Generator | None = None) -> None:
    """Give a random number generator of every process the state of the first process's.

    Args:
        rng_type: "torch", "generator", or the name of an accelerator, such as "cuda".
        generator: The one that "generator" means.
    """
    world = PartialState().world
    kind = getattr(rng_type, "value", rng_type)
    if kind == "generator":
        if generator is None:
            raise ValueError("rng_type='generator' needs a generator")
        generator.set_state(world.object_of_first(generator.get_state()))
    elif kind == "torch":
        torch.set_rng_state(world.object_of_first(torch.get_rng_state()))
    else:
        device = torch.get_device_module(kind)
        device.set_rng_state(world.object_of_first(device.get_rng_state()))


def synchronize_rng_states(rng_types: list[str], generator: torch.Generator | None = None) -> None:
    """`synchronize_rng_state` for several."""
    for rng_type in rng_types:
        synchronize_rng_state(rng_type, generator)


def _check(verb: str, value: Any, state: Any) -> None:
    """In debug mode, compare shapes over the processes first: a mismatch would end in a hang or in wrong numbers."""
    if not state.debug or not state.use_distributed:
        return
    shapes: list[tuple[int, ...]] = []
    map_tensors(lambda tensor: shapes.append(tuple(tensor.shape)), value)
    everyone = state.world.objects_of_all(shapes)
    if verb == "pad_across_processes":  # sizes may differ, the number of dimensions may not
        differs = any([len(s) for s in theirs] != [len(s) for s in shapes] for theirs in everyone)
    else:
        differs = any(theirs != shapes for theirs in everyone)
    if differs:
        shown = "\n".join(f"  - process {rank}: {theirs}" for rank, theirs in enumerate(everyone))
        raise DistributedOperationException(f"{verb}: the processes gave tensors of different shapes:\n{shown}")
