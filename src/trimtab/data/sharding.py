"""Which rows of a batch this process takes. Every process reads the same order and takes its own part of it.

A batch that has fewer rows than there are processes leaves some without any. These get a row of another process, so
that they can run forward with the others, and `num_rows` 0 says that it counts for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from trimtab.distributed.shares import share_bounds
from trimtab.distributed.world import World
from trimtab.errors import PrepareError
from trimtab.log import say_once


@dataclass(frozen=True)
class Shard:
    """What this process takes of a batch."""

    content: Any
    rows_of_all: tuple[int, ...]  # how many rows each process has
    rank: int = 0

    @property
    def num_rows(self) -> int:
        """How many rows are this process's own."""
        return self.rows_of_all[self.rank]

    @property
    def row_share(self) -> float:
        """This process's rows, as a multiple of what each process has on average."""
        total = sum(self.rows_of_all)
        return self.num_rows * len(self.rows_of_all) / total if total else 1.0


class Sharding(Protocol):
    """How batches are shared out."""

    num_processes: int
    group_size: int  # batches that are read for each one that is delivered

    def share_indices(self, group: list[Any]) -> Shard:
        """This process's part of batches of indices."""

    def share_loaded(self, group: list[Any]) -> Shard:
        """This process's part of batches that were loaded already."""


class NoSharding:
    """Batches as they are: one process, or a loader that was divided before it came here."""

    group_size = 1

    def __init__(self, num_processes: int = 1, rank: int = 0) -> None:
        self.num_processes = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any]) -> Shard:
        """All of it; where others have their own part, it is taken to be as large."""
        size = len(group[0]) if hasattr(group[0], "__len__") else 0
        return Shard(group[0], (size,) * self.num_processes, self._rank)

    def share_loaded(self, group: list[Any]) -> Shard:
        """All of it, without a look at it."""
        return Shard(group[0], (0,) * self.num_processes, self._rank)


class SplitRows:
    """Each batch is divided: the batch size is that of all processes together."""

    group_size = 1

    def __init__(self, rank: int, num_processes: int) -> None:
        self.num_processes = num_processes
        self._rank = rank

    def _bounds(self, num_rows: int) -> tuple[int, int, tuple[int, ...]]:
        bounds = [share_bounds(num_rows, rank, self.num_processes) for rank in range(self.num_processes)]
        start, end = bounds[self._rank]
        if start == end:  # a stand-in: the first row, which is another process's
            start, end = 0, 1
        return start, end, tuple(last - first for first, last in bounds)

    def share_indices(self, group: list[Any]) -> Shard:
        """Consecutive indices."""
        indices = list(group[0])
        start, end, rows_of_all = self._bounds(len(indices))
        return Shard(indices[start:end], rows_of_all, self._rank)

    def share_loaded(self, group: list[Any]) -> Shard:
        """Consecutive rows, cut out of every tensor and list of the batch."""
        num_rows = count_rows(group[0])
        if num_rows is None:
            raise PrepareError(
                f"a batch of type {type(group[0]).__name__} without tensors cannot be divided among processes",
                "let the dataset give tensors, or Engine(split_batches=False): whole batches for each process",
            )
        start, end, rows_of_all = self._bounds(num_rows)
        return Shard(_rows(group[0], start, end, num_rows), rows_of_all, self._rank)


class BatchEach:
    """Each process takes a whole batch of its own: the batch size is that of one process, as Accelerate means it."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self.num_processes = self.group_size = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any]) -> Shard:
        """The batch of this process's number; in a last, short group some have none."""
        return self._share(group, [len(batch) if hasattr(batch, "__len__") else 1 for batch in group])

    def share_loaded(self, group: list[Any]) -> Shard:
        """The same for batches that were loaded."""
        return self._share(group, [count_rows(batch) or 1 for batch in group])

    def _share(self, group: list[Any], sizes: list[int]) -> Shard:
        rows_of_all = tuple(sizes + [0] * (self.num_processes - len(group)))
        content = group[self._rank] if self._rank < len(group) else group[0]
        return Shard(content, rows_of_all, self._rank)


def sharding_for(loader: DataLoader[Any], world: World, splits_batches: bool) -> Sharding:
    """How the batches of a loader are shared out.

    Args:
        loader: The loader.
        world: The processes.
        splits_batches: Whether its batch size is that of all processes together.
    """
    rank, num_processes = world.process_index, world.num_processes
    if num_processes == 1:
        return NoSharding()
    samplers = (loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    if any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        say_once("a loader with a DistributedSampler is divided already: it is used as it is")
        return NoSharding(num_processes, rank)
    if not splits_batches:
        return BatchEach(rank, num_processes)
    if loader.batch_size is not None:
        say_once(
            f"a loader's batch size is that of all {num_processes} processes together "
            "(split_batches=False: of each of them)"
        )
    return SplitRows(rank, num_processes)


def count_rows(batch: Any) -> int | None:
    """The rows of a batch: the length of its first tensor, or None where there is none."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    values: Sequence[Any] = ()
    if isinstance(batch, Mapping) or hasattr(batch, "items"):
        values = [value for _, value in batch.items()]
    elif isinstance(batch, list | tuple):
        values = batch
    counts = (count_rows(value) for value in values)
    return next((count for count in counts if count is not None), None)


def _rows(value: Any, start: int, end: int, num_rows: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() and len(value) == num_rows else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_rows(item, start, end, num_rows) for item in value))
    if isinstance(value, list | tuple):
        if len(value) == num_rows and not any(isinstance(item, torch.Tensor | list | tuple | dict) for item in value):
            return value[start:end]
        return type(value)(_rows(item, start, end, num_rows) for item in value)
    if type(value) is dict:
        return {key: _rows(item, start, end, num_rows) for key, item in value.items()}
    if hasattr(value, "items"):  # a tokenizer's BatchEncoding, and other mappings
        return type(value)({key: _rows(item, start, end, num_rows) for key, item in value.items()})
    return value
