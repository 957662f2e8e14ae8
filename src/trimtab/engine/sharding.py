"""Which rows of a batch this process takes. Every process reads the same order and takes its own part of it.

A batch that has fewer rows than there are processes leaves some without any. These get a row of another process, so
that they can run forward with the others, and `num_rows` 0 says that it counts for nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from trimtab.distributed.row_shares import share_bounds
from trimtab.errors import PrepareError

MISSING = object()  # in the place of a batch: this process has none, and its epoch ends here


@dataclass(frozen=True)
class LoaderRules:
    """How loaders are shared among processes.

    Args:
        splits: The batch size of a loader is that of all processes together; else each process takes whole batches.
        as_accelerate: Parts are of equal size, the epoch's first rows fill up its last batches, and every process
            counts alike in the mean. Else each row is taken once, and processes count by their rows.
        is_even: Every process has the same number of batches.
        dispatches: The first process reads and sends the others their part; None: where the dataset is iterable.
        is_seedable: A shuffled order follows from a seed and the epoch alone.
        data_seed: That seed; torch's initial seed if None.
    """

    splits: bool = True
    as_accelerate: bool = False
    is_even: bool = True
    dispatches: bool | None = False
    is_seedable: bool = False
    data_seed: int | None = None


@dataclass(frozen=True)
class Shard:
    """What this process takes of a batch."""

    content: Any
    rows_of_all: tuple[int, ...]  # how many rows each process has
    rank: int = 0
    num_held: int = 0  # rows of `content`, if some of them only fill it up
    counts_alike: bool = False  # every process counts the same in the mean, whatever it holds

    @property
    def num_rows(self) -> int:
        """How many rows are this process's own."""
        return self.rows_of_all[self.rank]

    @property
    def row_share(self) -> float:
        """This process's rows, as a multiple of what each process has on average."""
        if self.counts_alike:
            return 1.0
        total = sum(self.rows_of_all)
        return self.num_rows * len(self.rows_of_all) / total if total else 1.0


class Sharding(Protocol):
    """How batches are shared out."""

    num_processes: int
    group_size: int  # batches that are read for each one that is delivered

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """This process's part of batches of indices; `first` are those that the epoch began with."""

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """This process's part of batches that were loaded already."""

    def num_shares(self, num_batches: int) -> int:
        """Batches that this process takes of an epoch."""


class NoSharding:
    """Batches as they are: one process, or a loader that was divided before it came here."""

    group_size = 1

    def __init__(self, num_processes: int = 1, rank: int = 0) -> None:
        self.num_processes = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """All of it; where others have their own part, it is taken to be as large."""
        size = len(group[0]) if hasattr(group[0], "__len__") else 0
        return Shard(group[0], (size,) * self.num_processes, self._rank)

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """All of it, without a look at it."""
        return Shard(group[0], (0,) * self.num_processes, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """All of them."""
        return num_batches


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

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Consecutive indices."""
        indices = list(group[0])
        start, end, rows_of_all = self._bounds(len(indices))
        return Shard(indices[start:end], rows_of_all, self._rank)

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Consecutive rows, cut out of every tensor and list of the batch."""
        num_rows = count_rows(group[0])
        if num_rows is None:
            raise PrepareError(
                f"a batch of type {type(group[0]).__name__} without tensors cannot be divided among processes",
                "let the dataset give tensors, or Engine(split_batches=False): whole batches for each process",
            )
        start, end, rows_of_all = self._bounds(num_rows)
        return Shard(rows_of(group[0], start, end, num_rows), rows_of_all, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """A part of each."""
        return num_batches


class BatchEach:
    """Each process takes a whole batch of its own: the batch size is that of one process, as Accelerate means it."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self.num_processes = self.group_size = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """The batch of this process's number; in a last, short group some have none."""
        return self._share(group, [len(batch) if hasattr(batch, "__len__") else 1 for batch in group])

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """The same for batches that were loaded."""
        return self._share(group, [count_rows(batch) or 1 for batch in group])

    def _share(self, group: list[Any], sizes: list[int]) -> Shard:
        rows_of_all = tuple(sizes + [0] * (self.num_processes - len(group)))
        content = group[self._rank] if self._rank < len(group) else group[0]
        return Shard(content, rows_of_all, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """One of each group, the last one included."""
        return -(-num_batches // self.num_processes)


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


def rows_of(value: Any, start: int, end: int, num_rows: int) -> Any:
    """Rows of every tensor and list of a batch that has `num_rows` of them."""
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() and len(value) == num_rows else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rows_of(item, start, end, num_rows) for item in value))
    if isinstance(value, list | tuple):
        if len(value) == num_rows and not any(isinstance(item, torch.Tensor | list | tuple | dict) for item in value):
            return value[start:end]
        return type(value)(rows_of(item, start, end, num_rows) for item in value)
    if type(value) is dict:
        return {key: rows_of(item, start, end, num_rows) for key, item in value.items()}
    if hasattr(value, "items"):  # a tokenizer's BatchEncoding, and other mappings
        return type(value)({key: rows_of(item, start, end, num_rows) for key, item in value.items()})
    return value


def joined_rows(batches: list[Any]) -> Any:
    """Batches of one kind as one, the opposite of `rows_of`."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(batches) if first.dim() else first
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(joined_rows(list(items)) for items in zip(*batches, strict=True)))
    if isinstance(first, list | tuple):
        if any(isinstance(item, torch.Tensor | list | tuple | dict) for item in first):
            return type(first)(joined_rows(list(items)) for items in zip(*batches, strict=True))
        return type(first)(item for batch in batches for item in batch)
    if hasattr(first, "items"):
        joined = {key: joined_rows([batch[key] for batch in batches]) for key in first}
        return joined if type(first) is dict else type(first)(joined)
    return first
