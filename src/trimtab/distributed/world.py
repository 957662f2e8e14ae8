"""The processes that train together, as one object. `SoloWorld` is the do-nothing default: one process."""

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from trimtab.distributed.health.monitor import Monitor, NoMonitor
from trimtab.errors import RecipeError

T = TypeVar("T")
Number = float | torch.Tensor


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
    monitor: Monitor | NoMonitor

    def gather(self, value: T) -> T:
        """Each tensor of `value` from every process, concatenated along the first dimension."""

    def gather_each(self, value: T) -> list[T]:
        """`value` of every process, in the order of ranks; tensors may differ in length."""

    def gather_object(self, value: Any) -> list[Any]:
        """One element for each process; lists are joined."""

    def objects_of_all(self, value: Any) -> list[Any]:
        """`value` of every process, whatever it is, in the order of ranks."""

    def object_of_first(self, value: T) -> T:
        """What the first process gave."""

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """Each tensor of `value` summed, averaged or maximized over the processes."""

    def total(self, value: Number, device: torch.device) -> Number:
        """The sum of a number over the processes; on an accelerator it stays there, and no host waits."""

    def pad_across_processes(self, value: T, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> T:
        """Each tensor of `value` padded to the largest size that any process holds."""

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""

    def main_process_first(self, local: bool = False) -> AbstractContextManager[None]:
        """A context in which the main process goes before the others."""

    def split(self, inputs: Any, apply_padding: bool = False) -> Any:
        """This process's share of a list, tuple, dict of lists, tensor or dataset."""

    def anyone(self, flag: bool) -> bool:
        """Whether any process says so. The hosts wait for each other, their devices for nobody."""

    def exchanging(self, verb: str) -> AbstractContextManager[Any]:
        """A context in which this process needs the others; one that is gone becomes a `PeerError` that names it."""

    def connect(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model, with gradients that are averaged over the processes."""


class SoloWorld:
    """One process: everything that is gathered is what it was."""

    num_processes = 1
    process_index = 0
    local_process_index = 0
    distributed_type = DistributedType.NO

    def __init__(self) -> None:
        self.monitor: Monitor | NoMonitor = NoMonitor()

    def gather(self, value: T) -> T:
        """`value` itself."""
        return value

    def gather_each(self, value: T) -> list[T]:
        """`value` alone."""
        return [value]

    def gather_object(self, value: Any) -> list[Any]:
        """A list is taken as this process's share already; anything else becomes a list of one."""
        return value if isinstance(value, list) else [value]

    def objects_of_all(self, value: Any) -> list[Any]:
        """`value` alone."""
        return [value]

    def object_of_first(self, value: T) -> T:
        """`value` itself."""
        return value

    def reduce(self, value: T, reduction: str = "sum", scale: float = 1.0) -> T:
        """`value`, times `scale`."""
        check_reduction(reduction)
        return value if scale == 1.0 else map_tensors(lambda tensor: tensor * scale, value)

    def total(self, value: Number, device: torch.device) -> Number:
        """The number itself."""
        return value

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

    def anyone(self, flag: bool) -> bool:
        """The flag itself."""
        return flag

    def exchanging(self, verb: str) -> AbstractContextManager[Any]:
        """Nobody is needed."""
        return nullcontext()

    def connect(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model itself."""
        return model


def check_reduction(reduction: str) -> None:
    """Refuse a word that no reduction has."""
    if reduction not in ("sum", "mean", "max", "none"):
        raise RecipeError(f"reduction={reduction!r} is not known", 'use "sum", "mean", "max" or "none"')


def of_same_kind(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """The items as a mapping of the same type, such as a model's output; as a dict where that type cannot be made."""
    if type(mapping) is dict:
        return items
    try:
        return type(mapping)(items)  # type: ignore[call-arg]
    except TypeError:  # a defaultdict, say
        return items


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """`value` with every tensor in it replaced by what `function` gives for it; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return of_same_kind(value, {key: map_tensors(function, item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(function, item) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(map_tensors(function, item) for item in value)
    return value


def concatenated(parts: list[Any]) -> Any:
    """What several processes gave as one value: tensors joined along the first dimension, containers kept."""
    first = parts[0]
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(parts)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise RecipeError(
                f"tensors of shapes {shapes} cannot be joined", "engine.pad_across_processes(tensor, dim=1) first"
            ) from error
    if isinstance(first, Mapping):
        return of_same_kind(first, {key: concatenated([part[key] for part in parts]) for key in first})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(concatenated(list(items)) for items in zip(*parts, strict=True)))
    if isinstance(first, list | tuple):
        return type(first)(concatenated(list(items)) for items in zip(*parts, strict=True))
    return first
