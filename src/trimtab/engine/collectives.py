"""Collective operations of the engine that need more than the world: the current batch, user errors, triggers."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from trimtab.distributed.world import World
from trimtab.engine.prepared_loader import ActiveLoaders
from trimtab.errors import UserError

T = TypeVar("T")


class Collectives:
    """Operations that every process of a run calls.

    Args:
        world: The processes.
        active_loaders: The loaders being iterated; the innermost one knows which rows are padding.
        device: The device of this process.
    """

    def __init__(self, world: World, active_loaders: ActiveLoaders, device: torch.device) -> None:
        self._world = world
        self._active_loaders = active_loaders
        self._device = device
        self.trigger = False

    @property
    def has_no_rows(self) -> bool:
        """Whether the current batch of this process contains padding rows only."""
        loader = self._active_loaders.innermost
        return loader is not None and loader.shard.has_no_rows

    def gather_for_metrics(self, value: Any, use_gather_object: bool = False) -> Any:
        """Gather the values of all processes without padding rows; objects are returned as a list."""
        if use_gather_object or not _is_all_tensors(value):
            return self._gather_objects(value)
        loader = self._active_loaders.innermost
        if loader is None:
            return self._world.gather(value)
        return loader.shard.real_rows(self._world.gather_per_rank(value), loader.loader.batch_size)

    def _gather_objects(self, value: Any) -> list[Any]:
        """Concatenate lists, or collect one object per process; processes that have only padding rows are left out."""
        loader = self._active_loaders.innermost
        value = value if loader is None else loader.shard.own_objects(value)
        gathered = self._world.all_gather_object((value, self.has_no_rows))
        counted = [theirs for theirs, is_padding in gathered if not is_padding]
        return [item for part in counted for item in part] if isinstance(value, list) else counted

    def decide_on_main_process(self, decide: Callable[[], T]) -> T:
        """Run `decide` on the main process and return its result on all processes, which also raise its `UserError`."""
        outcome: tuple[Any, UserError | None] = (None, None)
        if self._world.process_index == 0:
            try:
                outcome = decide(), None
            except UserError as error:
                if self._world.num_processes == 1:
                    raise
                outcome = None, error
        decided, problem = self._world.broadcast_object(outcome)
        if problem is not None:
            raise problem
        result: T = decided
        return result

    def check_trigger(self) -> bool:
        """Return whether any process has set its trigger, and clear it. One all-reduce and one host-device sync."""
        flag = self._world.reduce(torch.tensor(int(self.trigger), device=self._device))
        is_set, self.trigger = bool(flag.item()), False
        return is_set


def _is_all_tensors(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return all(_is_all_tensors(item) for item in value.values())
    return isinstance(value, list | tuple) and all(_is_all_tensors(item) for item in value)
