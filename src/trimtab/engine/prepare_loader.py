"""From a DataLoader to a prepared one: which sharding, who reads, and whose order it is."""

from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trimtab.distributed.world import World
from trimtab.engine.accelerate_sharding import AccelerateSharding
from trimtab.engine.dispatched_loader import DispatchedLoader
from trimtab.engine.placement import Placement
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.seedable_samplers import give_generator, with_seedable_sampler
from trimtab.engine.sharding import BatchEach, LoaderRules, NoSharding, Sharding, SplitRows
from trimtab.log import say_once


def prepare_loader(
    loader: DataLoader[Any], place: Placement, active: ActiveLoaders, world: World, rules: LoaderRules
) -> PreparedLoader:
    """A loader whose batches arrive on the device, shared out by the rules."""
    if rules.is_seedable:
        seed = torch.initial_seed() if rules.data_seed is None else rules.data_seed
        loader = with_seedable_sampler(loader, world.object_of_first(seed))  # the same order on every process
    is_iterable = isinstance(loader.dataset, IterableDataset)
    dispatches = is_iterable if rules.dispatches is None else rules.dispatches
    sharding = sharding_for(loader, world, rules, dispatches)
    if isinstance(sharding, NoSharding):
        kind = DispatchedLoader if dispatches and is_iterable else PreparedLoader
        return kind(loader, place, active, world, sharding)
    if loader.batch_size is not None:
        _say_whose_batch_it_is(loader.batch_size, world.num_processes, rules)
    if dispatches:
        return DispatchedLoader(loader, place, active, world, sharding)
    if rules.as_accelerate and not is_iterable and not rules.is_seedable:
        give_generator(loader)
    return PreparedLoader(loader, place, active, world, sharding)


def sharding_for(loader: DataLoader[Any], world: World, rules: LoaderRules, dispatches: bool = False) -> Sharding:
    """How the batches of a loader are shared out.

    Args:
        loader: The loader.
        world: The processes.
        rules: Those of the engine.
        dispatches: The first process reads for all.
    """
    rank, num_processes = world.process_index, world.num_processes
    if num_processes == 1:
        return NoSharding()
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        say_once("a loader with a DistributedSampler is divided already: it is used as it is")
        return NoSharding(num_processes, rank)
    if rules.as_accelerate or not rules.is_even:
        batches = _batches_of(loader)
        return AccelerateSharding(
            rank,
            num_processes,
            splits=rules.splits,
            is_even=rules.is_even,
            batch_size=_batch_size_of(loader),
            drop_last=bool(loader.drop_last or getattr(batches, "drop_last", False)),
            dispatches=dispatches,
        )
    return SplitRows(rank, num_processes) if rules.splits else BatchEach(rank, num_processes)


def _batches_of(loader: DataLoader[Any]) -> Any:
    return loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler


def _batch_size_of(loader: DataLoader[Any]) -> int | None:
    return loader.batch_size or getattr(_batches_of(loader), "batch_size", None)


def _say_whose_batch_it_is(batch_size: int, num_processes: int, rules: LoaderRules) -> None:
    """With Accelerate a batch is that of one process, here that of all: a line says which it is, and what follows."""
    each, is_uneven = divmod(batch_size, num_processes)
    share = f"{each} or {each + 1}" if is_uneven else str(each)
    shared = f"batch of {batch_size} shared by {num_processes} processes, {share} each"
    of_each = f"{batch_size} each"
    if rules.splits:
        say_once(
            f"{shared}; a schedule steps once for each optimizer step; split_batches=False for {of_each} and "
            f"{num_processes} steps, as Accelerate counts"
        )
    else:
        say_once(
            f"batch of {batch_size} for each of {num_processes} processes; a schedule steps {num_processes} times for "
            f"each optimizer step, as Accelerate counts; split_batches=True for {share} each and one step"
        )
