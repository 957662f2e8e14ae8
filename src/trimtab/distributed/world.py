"""The processes that train together, as one object. `SoloWorld` is the do-nothing default: one process."""

import enum
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from trimtab.errors import RecipeError

T = TypeVar("T")


class DistributedType(enum.StrEnum):
    """How the processes are connected; compares equal to the same word as text."""

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


class World(Protocol):
    """What the engine asks of the processes that train together."""

    num_processes: int
    process_index: int
    local_process_index: int
    distributed_type: DistributedType

    def gather(self, value: T) -> T:
        """Each tensor of `value` from every process, concatenated along the first dimension."""

    def gather_object(self, value: Any) -> list[Any]:
        """One element for each process."""

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Each tensor of `value` summed or averaged over the processes."""

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Each tensor of `value` padded to the largest size that any process holds."""

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""

    def main_process_first(self, local: bool = False) -> Any:
        """A context in which the main process goes before the others."""

    def split(self, inputs: Any, apply_padding: bool = False) -> Any:
        """This process's share of a list, tuple, dict of lists or tensor."""


class SoloWorld:
    """One process: everything that is gathered is what it was."""

    num_processes = 1
    process_index = 0
    local_process_index = 0
    distributed_type = DistributedType.NO

    def gather(self, value: T) -> T:
        """`value` itself."""
        return value

    def gather_object(self, value: Any) -> list[Any]:
        """A list is taken as this process's share already; anything else becomes a list of one."""
        return value if isinstance(value, list) else [value]

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """`value`, times `scale`."""
        if reduction not in ("sum", "mean", "none"):
            raise RecipeError(f"reduction={reduction!r} is not known", 'use "sum", "mean" or "none"')
        return value if scale == 1.0 else _map_tensors(lambda tensor: tensor * scale, value)

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """`value` itself: nobody holds a larger one."""
        return value

    def wait_for_everyone(self) -> None:
        """Nobody to wait for."""

    @contextmanager
    def main_process_first(self, local: bool = False) -> Iterator[None]:
        """Nobody to go before."""
        yield

    def split(self, inputs: Any, apply_padding: bool = False) -> Any:
        """All of it."""
        return inputs


def _map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _map_tensors(function, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(function, item) for item in value)
    return value


def find_world() -> World:
    """The world that this process was started in, read from the environment that launchers set."""
    num_processes = int(os.environ.get("WORLD_SIZE", "1"))
    if num_processes > 1:
        raise RecipeError(
            f"WORLD_SIZE={num_processes}: this process was started as one of several, which is not supported yet",
            "start one process, without torchrun or srun",
        )
    return SoloWorld()
