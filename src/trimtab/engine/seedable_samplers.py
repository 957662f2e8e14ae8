"""Shuffled orders that depend only on seed and epoch, and generators that several processes can share."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order depends only on the seed plus the epoch.

    Args:
        args: Arguments of `torch.utils.data.RandomSampler`.
        data_seed: The seed; None uses torch's initial seed.
        kwargs: Keyword arguments of `torch.utils.data.RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # created now, not at the first iteration: a loader checks the number of its generators on resume
        if self.generator is None:
            self.generator = torch.Generator()
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch


def random_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that determines the order of the rows: the one inside the batch sampler, if there is one."""
    return getattr(batch_sampler_of(loader), "sampler", None)


def batch_sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the batch sampler of a loader, or None."""
    return getattr(loader, _batch_sampler_name(loader))


def _batch_sampler_name(loader: DataLoader[Any]) -> str:
    """Return the attribute that holds the batch sampler: `sampler` for DataLoader(sampler=BatchSampler(…))."""
    return "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"


def with_seedable_sampler(loader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """Return the loader, or a copy with a `SeedableRandomSampler` if it has a random sampler."""
    sampler = random_sampler_of(loader)
    if not isinstance(sampler, RandomSampler) or isinstance(sampler, SeedableRandomSampler):
        return loader
    seedable = SeedableRandomSampler(
        sampler.data_source,
        replacement=sampler.replacement,
        num_samples=sampler._num_samples,
        generator=sampler.generator,
        data_seed=data_seed,
    )
    changed = copy.copy(loader)
    name = _batch_sampler_name(loader)
    batches = copy.copy(batch_sampler_of(loader))
    batches.sampler = seedable
    # DataLoader forbids assignment to these names after construction; this is a copy
    object.__setattr__(changed, name, batches)
    if name == "batch_sampler" and loader.sampler is sampler:
        object.__setattr__(changed, "sampler", seedable)
    return changed


def give_generator(loader: DataLoader[Any]) -> None:
    """Give a random sampler without a generator a new one, seeded from torch's generator, as Accelerate does."""
    sampler = random_sampler_of(loader)
    if getattr(sampler, "generator", 0) is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
