"""Shuffled orders that follow from a seed and the epoch alone, and generators that several processes can share."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order is that of the seed plus the epoch, whatever was drawn before.

    Args:
        args: Those of `torch.utils.data.RandomSampler`.
        data_seed: The seed; torch's initial seed if None.
        kwargs: Those of `torch.utils.data.RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.generator is None:  # from the beginning: what a loader saves of its place counts its generators
            self.generator = torch.Generator()
        self.initial_seed = torch.random.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.epoch += 1

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration."""
        self.epoch = epoch


def random_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that decides the order of the rows: behind the batch sampler, if there is one."""
    is_of_batches = isinstance(loader.sampler, BatchSampler)
    return getattr(loader.sampler if is_of_batches else loader.batch_sampler, "sampler", None)


def with_seedable_sampler(loader: DataLoader[Any], data_seed: int | None) -> DataLoader[Any]:
    """The loader, or a copy that is shuffled by a `SeedableRandomSampler` where it was shuffled by a random one."""
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
    name = "sampler" if isinstance(loader.sampler, BatchSampler) else "batch_sampler"
    batches = copy.copy(getattr(loader, name))
    batches.sampler = seedable
    # DataLoader guards these names against assignment after construction; a copy may differ
    object.__setattr__(changed, name, batches)
    if name == "batch_sampler" and loader.sampler is sampler:
        object.__setattr__(changed, "sampler", seedable)
    return changed


def give_generator(loader: DataLoader[Any]) -> None:
    """Give a random sampler without a generator one of its own, seeded by torch's, as Accelerate does it."""
    sampler = random_sampler_of(loader)
    if getattr(sampler, "generator", 0) is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
