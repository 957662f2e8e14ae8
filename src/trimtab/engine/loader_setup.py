"""Turn a DataLoader into a prepared loader: choose its sharding, the process that reads, and the sampler."""

from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from trimtab.distributed.world import World
from trimtab.engine.accelerate_sharding import AccelerateSharding
from trimtab.engine.dispatched_loader import DispatchedLoader
from trimtab.engine.placement import Placement
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.seedable_samplers import batch_sampler_of, give_generator, with_seedable_sampler
from trimtab.engine.sharding import BatchEach, LoaderRules, NoSharding, Sharding, SplitRows
from trimtab.log import log_info_once


def prepare_loader(
    loader: DataLoader[Any], place: Placement, active: ActiveLoaders, world: World, rules: LoaderRules
) -> PreparedLoader:
    """Return a loader that delivers this process's batches on the device, divided by the rules."""
    if rules.is_seedable:
        seed = torch.initial_seed() if rules.data_seed is None else rules.data_seed
        loader = with_seedable_sampler(loader, world.broadcast_object(seed))  # the same order on every process
    is_iterable = isinstance(loader.dataset, IterableDataset)
    dispatches = is_iterable if rules.dispatches is None else rules.dispatches
    sharding = sharding_for(loader, world, rules, dispatches)
    if isinstance(sharding, NoSharding):
        kind = DispatchedLoader if dispatches and is_iterable else PreparedLoader
        return kind(loader, place, active, world, sharding, rules.as_accelerate)
    if loader.batch_size is not None:
        _log_batch_size(loader.batch_size, world.num_processes, rules)
    if dispatches:
        return DispatchedLoader(loader, place, active, world, sharding)
    if rules.as_accelerate and not is_iterable and not rules.is_seedable:
        give_generator(loader)
    return PreparedLoader(loader, place, active, world, sharding, rules.as_accelerate)


def sharding_for(loader: DataLoader[Any], world: World, rules: LoaderRules, dispatches: bool = False) -> Sharding:
    """Return the sharding for a loader.

    Args:
        loader: The loader.
        world: The processes.
        rules: The rules of the engine.
        dispatches: Whether the main process reads the data for all processes.
    """
    rank, num_processes = world.process_index, world.num_processes
    if num_processes == 1:
        return NoSharding()
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        log_info_once("a loader with a DistributedSampler is already divided among processes: it is not divided again")
        return NoSharding(num_processes, rank)
    if rules.as_accelerate or not rules.is_even:
        batches = batch_sampler_of(loader)
        return AccelerateSharding(
            rank,
            num_processes,
            splits=rules.splits,
            is_even=rules.is_even,
            batch_size=loader.batch_size or getattr(batches, "batch_size", None),
            drop_last=bool(loader.drop_last or getattr(batches, "drop_last", False)),
            dispatches=dispatches,
        )
    return SplitRows(rank, num_processes) if rules.splits else BatchEach(rank, num_processes)


def _log_batch_size(batch_size: int, num_processes: int, rules: LoaderRules) -> None:
    """Log whether the batch size counts the rows of one process, as in Accelerate, or of all, the engine's default."""
    each, is_uneven = divmod(batch_size, num_processes)
    share = f"{each} or {each + 1}" if is_uneven else str(each)
    if rules.splits:
        log_info_once(
            f"batches of {batch_size} are divided among {num_processes} processes, {share} rows each; schedulers "
            f"step once per optimizer step (split_batches=False: {batch_size} rows each, {num_processes} steps, as in "
            "Accelerate)"
        )
    else:
        log_info_once(
            f"batches of {batch_size} on each of {num_processes} processes; schedulers step {num_processes} times per "
            f"optimizer step, as in Accelerate (split_batches=True: {share} rows each, one step)"
        )
