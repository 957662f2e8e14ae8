"""The processes as scripts written for Accelerate ask for them: plain facts, and the verbs that need no engine."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from trimtab.distributed.world import DistributedType, World

T = TypeVar("T")


class ProcessState:
    """What `engine.state`, `PartialState()` and `AcceleratorState()` give.

    Args:
        world: The processes.
        device: Where this process computes.
        mixed_precision: The engine's; "no" where there is none.
    """

    __slots__ = ("__dict__", "_world")  # facts alone are in `__dict__`: states that say the same compare equal by it

    # processes are data parallel, and nothing else
    deepspeed_plugin = fsdp_plugin = parallelism_config = dynamo_plugin = None
    is_fsdp2 = fork_launched = False

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
        """The processes."""
        return self._world

    @property
    def initialized(self) -> bool:
        """Always: there is nothing to be set up first."""
        return True

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is the first process of all."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is the first process of its host."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of all."""
        return self.process_index == self.num_processes - 1

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self._world.wait_for_everyone()

    def main_process_first(self) -> AbstractContextManager[None]:
        """A context in which the main process goes first."""
        return self._world.main_process_first()

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """A context in which the first process of each host goes first."""
        return self._world.main_process_first(local=True)

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> AbstractContextManager[Any]:
        """A context that gives this process its share of a list, tuple, dict or tensor."""
        return nullcontext(self._world.split(inputs, apply_padding))

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the main process only, elsewhere it returns None."""
        return run_if(lambda: self.is_main_process, function)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the first process of each host only."""
        return run_if(lambda: self.is_local_main_process, function)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the last process only."""
        return run_if(lambda: self.is_last_process, function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator, with or without the function: it runs on the process of that index only."""
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        return run_if(lambda: self.process_index == process_index, function)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator, with or without the function: it runs on that process of each host only."""
        if function is None:
            return functools.partial(self.on_local_process, local_process_index=local_process_index)
        return run_if(lambda: self.local_process_index == local_process_index, function)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, on the first process of each host only."""
        if self.is_local_main_process:
            print(*args, **kwargs)  # noqa: T201

    def destroy_process_group(self, group: Any = None) -> None:
        """Nothing to do: the processes part when the program ends."""

    @staticmethod
    def _reset_state(*args: Any, **kwargs: Any) -> None:
        """Nothing to do: no setting is shared between engines."""


def run_if(condition: Callable[[], bool], function: Callable[..., T]) -> Callable[..., T | None]:
    """The function, which runs where the condition holds when it is called, and elsewhere returns None."""

    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if condition() else None

    return guarded
