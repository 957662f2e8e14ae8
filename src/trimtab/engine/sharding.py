"""The rows of a batch that this process takes. Every process reads the same order and takes its own part of it.

If a batch has fewer rows than there are processes, some processes have no rows. They get a row of another process as
padding, because every process must run forward, and their `num_rows` is 0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch

from trimtab.distributed.rank_split import split_bounds
from trimtab.distributed.world import concatenated, rebuild_mapping
from trimtab.errors import PrepareError

MISSING = object()  # content of a shard: this process has no batch, and its epoch ends here


@dataclass(frozen=True)
class LoaderRules:
    """How loaders are divided among processes.

    Args:
        splits: Whether the batch size of a loader counts the rows of all processes; else each process takes whole
            batches.
        as_accelerate: Whether parts have equal size, the last batches are padded with the first rows of the epoch, and
            processes have equal weight in the mean. Else each row is used once, and processes are weighted by their
            rows.
        is_even: Whether every process has the same number of batches.
        dispatches: Whether the main process reads the data for all processes; None means only for iterable datasets.
        is_seedable: Whether a shuffled order depends only on seed and epoch.
        data_seed: That seed; None uses torch's initial seed.
    """

    splits: bool = True
    as_accelerate: bool = False
    is_even: bool = True
    dispatches: bool | None = False
    is_seedable: bool = False
    data_seed: int | None = None


@dataclass(frozen=True)
class Shard:
    """This process's part of a batch.

    Args:
        content: The rows or indices, padding included.
        rows_of_all: The number of rows of each process without padding; zeros if unknown.
        rank: The rank of this process.
        num_held: The number of rows in `content`, if some may be padding; else 0.
        has_equal_weight: Whether every process has the same weight in the mean, regardless of its rows.
    """

    content: Any
    rows_of_all: tuple[int, ...]
    rank: int = 0
    num_held: int = 0
    has_equal_weight: bool = False

    @property
    def num_rows(self) -> int:
        """The number of rows of this process, without padding."""
        return self.rows_of_all[self.rank]

    @property
    def row_share(self) -> float:
        """The number of rows of this process divided by the average over all processes."""
        if self.has_equal_weight:
            return 1.0
        total = sum(self.rows_of_all)
        return self.num_rows * len(self.rows_of_all) / total if total else 1.0

    @property
    def has_no_rows(self) -> bool:
        """Whether all rows are padding."""
        return self.row_share == 0 or (self.num_held > 0 and self.num_rows == 0)

    def own_objects(self, value: Any) -> Any:
        """Remove the objects of padding rows from a list with one object per row; return anything else unchanged."""
        is_per_row = isinstance(value, list) and len(value) == self.num_held
        return value[: self.num_rows] if is_per_row else value

    def real_rows(self, parts: list[Any], batch_size: int | None) -> Any:
        """Concatenate the values that each process computed for this batch, without padding rows.

        Only tensors as long as a full batch are cut, including a single value that was repeated for each row.

        Args:
            parts: The values of all processes.
            batch_size: The batch size of the loader.
        """
        full = {batch_size or 0, self.num_held}
        if len(parts) > 1:
            full |= {-(-size // len(parts)) for size in full}
        if len(self.rows_of_all) == len(parts) and any(self.rows_of_all):
            parts = [_first_rows(part, num, full) for part, num in zip(parts, self.rows_of_all, strict=True)]
        return concatenated(parts) if len(parts) > 1 else parts[0]


def _first_rows(value: Any, num_rows: int, full: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.dim() or (num_rows and (len(value) not in full or len(value) < num_rows)):
            return value
        return value[:num_rows]
    if isinstance(value, Mapping):
        return rebuild_mapping(value, {key: _first_rows(item, num_rows, full) for key, item in value.items()})
    return type(value)(_first_rows(item, num_rows, full) for item in value)


class Sharding(Protocol):
    """How batches are divided among processes."""

    num_processes: int
    group_size: int  # batches read per batch delivered

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Return this process's part of a group of index batches; `first` is the first group of the epoch."""

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Return this process's part of a group of loaded batches."""

    def num_shares(self, num_batches: int) -> int:
        """Return how many of the `num_batches` batches of an epoch this process takes."""


class NoSharding:
    """Whole batches: for one process, or for a loader that is already divided."""

    group_size = 1

    def __init__(self, num_processes: int = 1, rank: int = 0) -> None:
        self.num_processes = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Return the batch; the other processes are assumed to have the same number of rows."""
        size = len(group[0]) if hasattr(group[0], "__len__") else 0
        return Shard(group[0], (size,) * self.num_processes, self._rank)

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Return the batch, without counting its rows."""
        return Shard(group[0], (0,) * self.num_processes, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """Return all of them."""
        return num_batches


class SplitRows:
    """Divides each batch: the batch size counts the rows of all processes."""

    group_size = 1

    def __init__(self, rank: int, num_processes: int) -> None:
        self.num_processes = num_processes
        self._rank = rank

    def _bounds(self, num_rows: int, rows_of_all: Sequence[int] | None = None) -> tuple[int, int, tuple[int, ...]]:
        bounds = [split_bounds(num_rows, rank, self.num_processes) for rank in range(self.num_processes)]
        if rows_of_all is not None:
            ends = list(accumulate(rows_of_all))
            bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        start, end = bounds[self._rank]
        if start == end:  # padding: the first row, which belongs to another process
            start, end = 0, 1
        return start, end, tuple(last - first for first, last in bounds)

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Return consecutive indices: as many as the sampler's `rows_of_all` says, else about equally many each."""
        indices = list(group[0])
        start, end, rows_of_all = self._bounds(len(indices), getattr(group[0], "rows_of_all", None))
        return Shard(indices[start:end], rows_of_all, self._rank)

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Return consecutive rows of every tensor and list of the batch."""
        num_rows = count_rows(group[0])
        if num_rows is None:
            raise PrepareError(
                f"a batch of type {type(group[0]).__name__} without tensors cannot be divided among processes",
                "return tensors from the dataset, or Engine(split_batches=False) for whole batches per process",
            )
        start, end, rows_of_all = self._bounds(num_rows)
        return Shard(rows_of(group[0], start, end, num_rows), rows_of_all, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """Return all of them: a part of each batch."""
        return num_batches


class BatchEach:
    """Gives each process whole batches: the batch size is that of one process, as in Accelerate."""

    def __init__(self, rank: int, num_processes: int) -> None:
        self.num_processes = self.group_size = num_processes
        self._rank = rank

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Return the batch at this process's rank; in a short last group some processes have none."""
        return self._share(group, [len(batch) if hasattr(batch, "__len__") else 1 for batch in group])

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Return the loaded batch at this process's rank."""
        return self._share(group, [count_rows(batch) or 1 for batch in group])

    def _share(self, group: list[Any], sizes: list[int]) -> Shard:
        rows_of_all = tuple(sizes + [0] * (self.num_processes - len(group)))
        content = group[self._rank] if self._rank < len(group) else group[0]
        return Shard(content, rows_of_all, self._rank)

    def num_shares(self, num_batches: int) -> int:
        """Return one per group, the last one included."""
        return -(-num_batches // self.num_processes)


def count_rows(batch: Any) -> int | None:
    """Return the number of rows of a batch: the length of its first tensor, or None without tensors."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else None
    values: Sequence[Any] = ()
    if hasattr(batch, "items"):
        values = [value for _, value in batch.items()]
    elif isinstance(batch, list | tuple):
        values = batch
    counts = (count_rows(value) for value in values)
    return next((count for count in counts if count is not None), None)


def rows_of(value: Any, start: int, end: int, num_rows: int) -> Any:
    """Slice every tensor and list in a batch of `num_rows` rows."""
    if isinstance(value, torch.Tensor):
        return value[start:end] if value.dim() and len(value) == num_rows else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rows_of(item, start, end, num_rows) for item in value))
    if isinstance(value, list | tuple):
        if len(value) == num_rows and not any(isinstance(item, torch.Tensor | list | tuple | dict) for item in value):
            return value[start:end]
        return type(value)(rows_of(item, start, end, num_rows) for item in value)
    if hasattr(value, "items"):  # a dict, a tokenizer's BatchEncoding, and other mappings
        rows = {key: rows_of(item, start, end, num_rows) for key, item in value.items()}
        return rows if type(value) is dict else type(value)(rows)
    return value


def joined_rows(batches: list[Any]) -> Any:
    """Concatenate batches of the same structure, the inverse of `rows_of`."""
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
