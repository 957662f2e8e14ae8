"""Accelerate's way to divide batches among processes: parts of equal size, padded with the first rows of the epoch.

`trimtab.accelerate.Accelerator` uses it, so that a script written for Accelerate gets the same batches. The engine's
own sharding (`sharding.py`) uses each row once instead.
"""

from typing import Any

from trimtab.engine.sharding import MISSING, Shard, count_rows, joined_rows, rows_of
from trimtab.errors import PrepareError


class AccelerateSharding:
    """Give every process parts of equal size.

    Args:
        rank: The rank of this process.
        num_processes: The number of processes.
        splits: Whether each batch is divided; else each process takes a whole batch of a group.
        is_even: Whether the last part is padded with the first rows of the epoch; else some processes have fewer rows,
            or no batch. May change between two epochs. Loaded batches are always padded.
        batch_size: The batch size of the loader; None if batches differ in size.
        drop_last: Whether parts that would need padding are left out.
        dispatches: Whether the last batch of an epoch is divided into equal parts before it is padded.
    """

    def __init__(
        self,
        rank: int,
        num_processes: int,
        *,
        splits: bool,
        is_even: bool,
        batch_size: int | None,
        drop_last: bool,
        dispatches: bool = False,
    ) -> None:
        if splits and (batch_size is None or batch_size % num_processes):
            raise PrepareError(
                f"split_batches=True: batch_size={batch_size} cannot be divided into {num_processes} equal parts",
                f"use a batch size that is a multiple of {num_processes}, or trimtab.Engine, which divides any",
            )
        self.num_processes = num_processes
        self.group_size = 1 if splits else num_processes
        self.is_even = is_even
        self._rank = rank
        self._batch_size = batch_size
        self._part_size = None if batch_size is None else batch_size * self.group_size // num_processes
        self._drop_last = drop_last
        self._dispatches = dispatches

    def num_shares(self, num_batches: int) -> int:
        """Return one batch per full group; whether a short last group adds one depends on the settings and the rank."""
        num_full, num_left = divmod(num_batches, self.group_size)
        if not num_left or self._drop_last:
            return num_full
        return num_full + (self.is_even or self._rank < num_left)

    def share_indices(self, group: list[Any], first: list[Any]) -> Shard:
        """Return this process's part of index batches."""
        sizes: list[int | None] = [len(batch) if hasattr(batch, "__len__") else None for batch in group]
        if self._part_size is None or not self._are_regular(sizes):
            return self._share_whole(group, first, sizes)
        rows = [row for batch in group for row in batch]
        num_real, num_all = len(rows), self._part_size * self.num_processes
        if num_real < num_all and self._drop_last:
            return self._missing()
        while self.is_even and len(rows) < num_all:
            rows += [row for batch in first for row in batch][: num_all - len(rows)]
        start = self._rank * self._part_size
        return self._shard(rows[start : start + self._part_size], num_real, self._part_size)

    def share_loaded(self, group: list[Any], first: list[Any]) -> Shard:
        """Return this process's part of loaded batches."""
        sizes = [count_rows(batch) for batch in group]
        is_complete = len(group) == self.group_size and all(size == self._batch_size for size in sizes)
        if None in sizes or self._part_size is None or (is_complete and self.group_size > 1):
            return self._share_whole(group, first, sizes)
        if self._drop_last and not is_complete:
            return self._missing()
        rows = _joined(group)
        num_real = count_rows(rows) or 0
        part_size = -(-num_real // self.num_processes) if self._dispatches else self._part_size
        num_all = part_size * self.num_processes
        filler = _joined(first)
        num_filler = count_rows(filler) or 1
        for start in range(num_real, num_all, num_filler):
            rows = _joined([rows, rows_of(filler, 0, min(num_filler, num_all - start), num_filler)])
        content = rows_of(rows, self._rank * part_size, (self._rank + 1) * part_size, num_all)
        return self._shard(content, num_real, part_size)

    def _are_regular(self, sizes: list[int | None]) -> bool:
        *before, last = sizes
        return all(size == self._batch_size for size in before) and last is not None and last <= (self._batch_size or 0)

    def _share_whole(self, group: list[Any], first: list[Any], sizes: list[int | None]) -> Shard:
        """Return a whole batch of any size; the first batches of the epoch pad a short last group."""
        num_missing = self.group_size - len(group)
        if num_missing and self._drop_last:
            return self._missing()
        counted = tuple(size or 1 for size in sizes) + (0,) * num_missing
        if self._rank < len(group):
            return Shard(group[self._rank], counted, self._rank, counted[self._rank], has_equal_weight=True)
        if not self.is_even:
            return self._missing()
        padding = first[(self._rank - len(group)) % len(first)]
        return Shard(padding, counted, self._rank, _num_rows(padding), has_equal_weight=True)

    def _shard(self, content: Any, num_real: int, part_size: int) -> Shard:
        """Return a part, with the number of rows of each process that are not padding."""
        starts = [rank * part_size for rank in range(self.num_processes)]
        rows_of_all = tuple(min(max(num_real - start, 0), part_size) for start in starts)
        if isinstance(content, list) and not content:
            return self._missing()
        return Shard(content, rows_of_all, self._rank, part_size, has_equal_weight=True)

    def _missing(self) -> Shard:
        return Shard(MISSING, (0,) * self.num_processes, self._rank)


def _joined(batches: list[Any]) -> Any:
    try:
        return joined_rows(batches)
    except RuntimeError as error:
        raise PrepareError(
            f"the last batches of an epoch are divided again, and cannot be joined: {error}",
            "pad all rows to one length, DataLoader(drop_last=True), or trimtab.Engine, which keeps batches whole",
        ) from error


def _num_rows(batch: Any) -> int:
    """Return the rows of a loaded batch or of a list of indices; 1 if they cannot be counted."""
    return count_rows(batch) or (len(batch) if isinstance(batch, list) else 1)
