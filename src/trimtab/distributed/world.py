"""`World`: the processes of a run and the collectives between them; with one process, all collectives do nothing."""

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

from trimtab.distributed.health.monitor import Monitor
from trimtab.errors import RecipeError

T = TypeVar("T")
Number = float | torch.Tensor


class DistributedType(enum.StrEnum):
    """How the processes of a run are connected; the values are Accelerate's and compare equal to strings."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MEGATRON_LM = "MEGATRON_LM"
    XLA = "XLA"
    TPU = "TPU"


class World:
    """The processes of a run. This base class is for one process: every collective is the identity.

    `GroupWorld` overrides it for several processes.
    """

    num_processes: int = 1
    process_index: int = 0
    local_process_index: int = 0
    distributed_type: DistributedType = DistributedType.NO

    def __init__(self, monitor: Monitor | None = None) -> None:
        self.monitor = monitor or Monitor()

    def gather(self, value: T) -> T:
        """Concatenate each tensor of `value` over the ranks, along the first dimension; a scalar counts as one row."""
        return value

    def gather_per_rank(self, value: T) -> list[T]:
        """Return `value` of every rank, in rank order. Tensors may differ in length."""
        return [value]

    def gather_object(self, value: Any) -> list[Any]:
        """Return one element per rank; lists are joined into one list."""
        return value if isinstance(value, list) else [value]

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable `value` of every rank, in rank order."""
        return [value]

    def broadcast_object(self, value: T) -> T:
        """Broadcast the picklable `value` of rank 0."""
        return value

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Reduce each tensor of `value` over the ranks ("sum", "mean", "max" or "none"), then multiply by `scale`."""
        check_reduction(reduction)
        return value if scale == 1.0 else map_tensors(lambda tensor: tensor * scale, value)

    def total(self, value: Number, device: torch.device) -> Number:
        """Sum a number over the ranks. On an accelerator the sum is a tensor on the device: no host-device sync."""
        return value

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Pad each tensor of `value` to the largest size that any rank has in this dimension."""
        return value

    def wait_for_everyone(self) -> None:
        """Block until every rank has called this (a barrier)."""

    @contextmanager
    def main_process_first(self, local: bool = False) -> Iterator[None]:
        """Run the block on rank 0 (with `local`, on local rank 0 of each host) before the other ranks run it."""
        yield

    def split(self, inputs: Any, apply_padding: bool = False) -> Any:
        """Return this rank's part of a list, tuple, dict of lists, tensor or dataset."""
        return inputs

    def anyone(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank. The hosts synchronize, the devices do not."""
        return flag

    def exchanging(self, operation: str) -> AbstractContextManager[Any]:
        """A context for a collective. If a rank is lost inside, the error is a `PeerError` that names it.

        Args:
            operation: Name of the collective, for messages; every rank has to enter the same names in the same order.
        """
        return nullcontext()

    def connect(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap the model for data-parallel training; other ways to shard a model belong here too."""
        return model


def check_reduction(reduction: str) -> None:
    """Raise an error if the reduction is unknown."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise RecipeError(f"reduction={reduction!r} is unknown", 'use "sum", "mean", "max" or "none"')


def rebuild_mapping(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """Build a mapping of the same type (such as a model output) from `items`; a dict if that type does not allow it."""
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:  # for example a defaultdict
        return items


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Apply `function` to every tensor in nested containers, which keep their type."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return rebuild_mapping(value, {key: map_tensors(function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def concatenated(parts: list[Any]) -> Any:
    """Merge the values of several ranks: concatenate tensors along the first dimension; containers keep their type."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise RecipeError(
                f"tensors of shapes {shapes} cannot be concatenated",
                "call engine.pad_across_processes(tensor, dim=1) first",
            ) from error
    if isinstance(first, Mapping):
        return rebuild_mapping(first, {key: concatenated([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(concatenated(list(items)) for items in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(concatenated(list(items)) for items in zip(*parts, strict=True))
    return first
