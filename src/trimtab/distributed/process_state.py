"""Properties and methods about the processes of a run, shared by `Engine` and by Accelerate's `PartialState`."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.distributed.world import DistributedType, World

T = TypeVar("T")


class ProcessInterface:
    """Properties and methods of a script that concern its processes; a subclass provides `_world`."""

    __slots__ = ()
    _world: World

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self._world.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this process has rank 0."""
        return self._world.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this process has local rank 0 on its host."""
        return self._world.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this process has the highest rank."""
        return self._world.process_index == self._world.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Block until all processes have called this method (a barrier)."""
        self._world.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose body runs on the main process before it runs on the other processes."""
        return self._world.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose body runs on the first process of each host before the other ones of that host."""
        return self._world.main_process_first(local=True)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """Return a context that yields this process's part of a list, tuple, dict, tensor or dataset.

        Args:
            inputs: The values to divide.
            apply_padding: Whether to repeat the last value, so that all parts have the same length.
        """
        return nullcontext(self._world.split(inputs, apply_padding))

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on the main process only; elsewhere it returns None."""
        return _run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on the first process of each host only."""
        return _run_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """Decorate a function to run on the last process only."""
        return _run_if(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Decorate a function to run on the process with that rank only; without a function, return a decorator."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return _run_if(lambda: self._world.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Decorate a function to run on the processes with that local rank; without a function, return a decorator."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return _run_if(lambda: self._world.local_process_index == local_process_index, function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call `print` on the first process of each host only."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201


class ProcessState(ProcessInterface):
    """The object behind `engine.state`, `PartialState()` and `AcceleratorState()`.

    Args:
        world: The processes of the run.
        device: The device of this process.
        mixed_precision: The precision of the engine; "no" without an engine.
    """

    # `_world` is a slot, so that `__dict__` contains only values: scripts compare states by `__dict__`.
    __slots__ = ("__dict__", "_world")

    # Accelerate's names for kinds of parallelism that do not exist here.
    deepspeed_plugin = fsdp_plugin = parallelism_config = dynamo_plugin = None
    is_fsdp2 = fork_launched = False
    initialized = True

    def __init__(self, world: World, device: torch.device, mixed_precision: str = "no") -> None:
        self._world = world
        self.device = device
        self.num_processes = world.num_processes
        self.process_index = world.process_index
        self.local_process_index = world.local_process_index
        self.distributed_type: DistributedType = world.distributed_type
        self.backend: str | None = dist.get_backend() if world.num_processes > 1 else None
        self.mixed_precision = mixed_precision
        self.debug = False

    def __repr__(self) -> str:
        facts = {
            "Distributed environment": f"{self.distributed_type}  Backend: {self.backend}",
            "Num processes": self.num_processes,
            "Process index": self.process_index,
            "Local process index": self.local_process_index,
            "Device": self.device,
            "Mixed precision type": self.mixed_precision,
        }
        return "".join(f"{name}: {value}\n" for name, value in facts.items())

    @property
    def world(self) -> World:
        """The processes of the run."""
        return self._world

    def destroy_process_group(self, group: Any = None) -> None:
        """Do nothing: the process group is destroyed when the program ends."""

    @staticmethod
    def _reset_state(*args: Any, **kwargs: Any) -> None:
        """Do nothing: engines share no state."""


def _run_if(condition: Callable[[], bool], function: Callable[..., T]) -> Callable[..., T | None]:
    """Wrap a function so that each call evaluates the condition and returns None if it is false."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if condition() else None

    return guarded
