"""The rows of each batch: a pure function of (seed, epoch) that groups rows of similar length.

Rows are shuffled, sorted by length within sort windows of many batches, split into batches, and the batches shuffled
again: there is little padding, and the order stays random.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice

import torch

from trimtab.data.packing import (
    choose_sizes,
    is_packed,
    rounded_up,
    share_by_tokens,
    split_by_tokens,
    split_packed,
)
from trimtab.distributed.rank_split import split_bounds

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batching:
    """How rows are batched; techniques change it.

    Attributes:
        is_packed: Whether batches are packed (`trimtab.data.packing`) instead of padded.
        has_few_sizes: Whether micro-batches are rounded up to few sizes.
        marks_equal_rows: Whether packed batches of equally long rows are marked (`trimtab.data.packing.ROW_LENGTH`).
    """

    is_packed: bool = False
    has_few_sizes: bool = False
    marks_equal_rows: bool = False


def epoch_batches(
    lengths: Sequence[int] | torch.Tensor,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    group_by_length: bool = True,
    sort_window: int = 50,
    shuffle: bool = True,
) -> list[list[int]]:
    """Return the batches of one epoch: every row exactly once.

    One batch is shorter if the number of rows is not a multiple of the batch size. Each of its rows gets a larger
    weight in a step. With grouping and shuffling it therefore has rows of any length and can be anywhere in the epoch,
    so that no length always gets the larger weight; otherwise it is the last batch.

    Args:
        lengths: Number of tokens of each row.
        batch_size: Rows per batch.
        seed: With `epoch`, determines the order.
        epoch: Starts at 0.
        group_by_length: Whether to group rows of similar length; without shuffling, all rows are sorted, longest first.
        sort_window: Number of batches that are sorted together.
        shuffle: Whether the order is random.
    """
    if batch_size < 1 or sort_window < 1:
        raise ValueError(f"batch_size is {batch_size} and sort_window {sort_window}; both must be at least 1")
    length_of = torch.as_tensor(lengths, dtype=torch.int64)
    num_rows = len(length_of)
    generator = _generator(seed, epoch)
    order = torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)
    if not group_by_length:
        return _split(order.tolist(), batch_size)
    if not shuffle:
        return _split(order[length_of[order].argsort(stable=True, descending=True)].tolist(), batch_size)
    window = torch.arange(num_rows) // (sort_window * batch_size)
    # Two stable sorts order by window, then length; rows of equal length keep the order of the shuffle.
    by_length = length_of[order].argsort(stable=True)
    order = order[by_length[window[by_length].argsort(stable=True)]]
    batches = _split_with_short_anywhere(order.tolist(), batch_size, sort_window, generator)
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Hash seed and epoch: neighbouring values give unrelated orders, and (1, 2) differs from (2, 1)."""
    digest = hashlib.blake2b(f"batches {seed} {epoch}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _split(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _split_with_short_anywhere(
    rows: list[int], batch_size: int, sort_window: int, generator: torch.Generator
) -> list[list[int]]:
    """Split into batches; the short one is at a random position of the last window, not always its longest rows."""
    num_full, num_left = divmod(len(rows), batch_size)
    if not num_left:
        return _split(rows, batch_size)
    num_full_in_last = num_full % sort_window
    at = num_full - int(torch.randint(num_full_in_last + 1, (), generator=generator))
    split = at * batch_size
    short = rows[split : split + num_left]
    return [*_split(rows[:split], batch_size), short, *_split(rows[split + num_left :], batch_size)]


class LengthGroupedBatches:
    """A batch sampler for a DataLoader that yields the micro-batches of the optimizer batches.

    With `group_by_length` the rows of an optimizer batch are sorted by length; each micro-batch has consecutive rows.

    Args:
        lengths: Number of tokens of each row.
        batch_size: Rows per optimizer step.
        micro_batch_size: Rows per forward pass; the last micro-batch of a batch may be smaller.
        seed: With the epoch, determines the order.
        group_by_length: Whether to group rows of similar length.
        shuffle: Whether the order is random.
        limit_batches: Maximum number of optimizer batches per epoch.
        tokens_per_row: Divides a batch by tokens: a micro-batch has at most `micro_batch_size` times this number of
            tokens, and any number of rows. None divides by rows.
        max_rows: With `tokens_per_row`, the maximum number of rows in a micro-batch of one process; None means no
            limit. It shrinks with `set_micro_batch_size`.
        num_processes: Processes that share a micro-batch; sizes above count all of them.
        batching: How rows are batched; determines `sizes`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        micro_batch_size: int,
        *,
        seed: int,
        group_by_length: bool = True,
        shuffle: bool = True,
        limit_batches: int | None = None,
        tokens_per_row: float | None = None,
        max_rows: int | None = None,
        num_processes: int = 1,
        batching: Batching | None = None,
    ) -> None:
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        self.lengths = torch.as_tensor(lengths, dtype=torch.int64)
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.seed = seed
        self.group_by_length = group_by_length
        self.shuffle = shuffle
        self.limit_batches = limit_batches
        self._tokens_per_row = tokens_per_row
        self._rows_limit, self._planned_size = max_rows, micro_batch_size
        self._num_processes = num_processes
        self._batching = batching or Batching()
        self._chosen_sizes: tuple[int, ...] | None = None
        longest = self.lengths.sort(descending=True).values[:batch_size]
        self._most_tokens: list[int] = longest.cumsum(0).tolist() or [0]  # tokens of one row, two rows, …
        self.epoch = 0
        self._drawn_epoch: int | None = None
        self._batches: list[list[int]] = []
        self._windows: list[Sequence[list[int]]] = []
        self._sizes: list[int] = []  # read at every micro-batch
        self._num_micro_batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def windows(self) -> list[Sequence[list[int]]]:
        """Return the optimizer batches of the current epoch, each as its micro-batches; drawn once per epoch."""
        if self._drawn_epoch != self.epoch:
            self._batches, self._drawn_epoch = self._draw(self.epoch), self.epoch
            self._divide()
        return self._windows

    def _draw(self, epoch: int) -> list[list[int]]:
        batches = epoch_batches(
            self.lengths,
            self.batch_size,
            seed=self.seed,
            epoch=epoch,
            group_by_length=self.group_by_length,
            shuffle=self.shuffle,
        )
        return batches[: self.limit_batches]

    def _divide(self) -> None:
        self._windows = [self._divided(rows) for rows in self._batches]
        self._sizes = [len(window) for window in self._windows]
        self._num_micro_batches = sum(self._sizes)

    def _divided(self, rows: list[int]) -> Sequence[list[int]]:
        max_tokens = self.max_tokens
        if max_tokens is None:
            return _split(rows, self.micro_batch_size)
        if self._num_processes > 1:
            return share_by_tokens(rows, self.lengths, max_tokens, self._num_processes, self.max_rows)
        return split_by_tokens(rows, self.lengths, max_tokens, self.max_rows)

    @property
    def _rows_of_process(self) -> int:
        return -(-self.micro_batch_size // self._num_processes)

    @property
    def max_tokens(self) -> int | None:
        """Tokens of the largest micro-batch of one process; None if batches are divided by rows."""
        if self._tokens_per_row is None:
            return None
        # the product of a rounded quotient would be off
        wanted = int(round(self._rows_of_process * self._tokens_per_row, 6))
        most_rows = min(self.max_rows or self.batch_size, len(self._most_tokens))
        return min(max(self._most_tokens[0], wanted), self._most_tokens[most_rows - 1])

    @property
    def max_rows(self) -> int | None:
        """Rows of the largest micro-batch of one process, if batches are divided by tokens; None means no limit."""
        if self._rows_limit is None:
            return None
        return max(1, self._rows_limit * self.micro_batch_size // self._planned_size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of tokens, or lengths of padded rows, that micro-batches are rounded up to; empty if not rounded.

        They are chosen from the first epoch, so they do not depend on where a run is resumed.
        """
        if not self._batching.has_few_sizes:
            return ()
        if self._chosen_sizes is None:
            micro_batches = [rows for batch in self._draw(0) for rows in self._divided(batch)]
            extents = [self._extent(share) for rows in micro_batches for share in self._shares(rows)]
            largest = self.max_tokens or self._extent(self.largest_share(self.largest_micro_batch()))
            self._chosen_sizes = choose_sizes([*extents, largest])
        return self._chosen_sizes

    def shape_of(self, rows: list[int]) -> tuple[int, int]:
        """The shape of the largest share of a process in a micro-batch, including padding and filler."""
        share = self.largest_share(rows)
        num_rows = 1 if self._batching.is_packed else len(share)
        return num_rows, rounded_up(self._extent(share), self.sizes)

    def largest_share(self, rows: list[int]) -> list[int]:
        """The rows of the process with the largest part of a micro-batch."""
        return max(self._shares(rows), key=lambda share: (self._extent(share), len(share)))

    def _extent(self, rows: list[int]) -> int:
        lengths = self.lengths[rows]
        return int(lengths.sum() if self._batching.is_packed else lengths.max())

    def _shares(self, rows: list[int]) -> list[list[int]]:
        """The rows of every process that has any."""
        counts = getattr(rows, "rows_of_all", None)
        if counts is None:
            bounds = (split_bounds(len(rows), rank, self._num_processes) for rank in range(self._num_processes))
            return [rows[start:end] for start, end in bounds if end > start]
        ends = list(accumulate(counts))
        return [rows[end - count : end] for end, count in zip(ends, counts, strict=True) if count]

    def set_micro_batch_size(self, micro_batch_size: int) -> None:
        """Split the same batches into micro-batches of another size, from the next iteration on."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        self.micro_batch_size = micro_batch_size
        self._chosen_sizes = None
        self._divide()

    def largest_micro_batch(self, other_lengths: Sequence[int] | None = None) -> list[int]:
        """Return the rows of a micro-batch that needs as much memory as any of the run.

        In every epoch some micro-batch contains the longest row and is padded to it. The longest rows together have at
        least the shape of that one (which may be a shorter last micro-batch).

        Args:
            other_lengths: Lengths of a field that is padded separately: the labels of an encoder-decoder. Half of the
                rows are then the longest ones of that field.
        """
        max_tokens = self.max_tokens
        if self.limit_batches is not None:  # the longest rows may not be among the few batches
            micro_batches = [rows for window in self.windows() for rows in window]
            if self._batching.is_packed:
                return max(micro_batches, key=lambda rows: self._extent(self.largest_share(rows)))
            return max(micro_batches, key=lambda rows: (len(rows) * self._longest(rows), self._longest(rows)))
        num_rows = min(self.micro_batch_size, self.batch_size, len(self.lengths))
        longest = self.lengths.argsort(stable=True, descending=True).tolist()
        if max_tokens is not None:
            return self._divided(longest[: self.batch_size])[0]
        if other_lengths is None:
            return longest[:num_rows]
        others = torch.as_tensor(other_lengths, dtype=torch.int64)
        if num_rows == 1:
            return [int((self.lengths + others).argmax())]
        rows = longest[: num_rows - num_rows // 2]
        taken = set(rows)
        also = (row for row in others.argsort(stable=True, descending=True).tolist() if row not in taken)
        return rows + list(islice(also, num_rows // 2))

    def _longest(self, rows: list[int]) -> int:
        return int(self.lengths[rows].max())

    def window_sizes(self) -> list[int]:
        """Return the number of micro-batches of each optimizer batch of the current epoch."""
        self.windows()
        return self._sizes

    def __iter__(self) -> Iterator[list[int]]:
        for window in self.windows():
            yield from window

    def __len__(self) -> int:
        self.windows()
        return self._num_micro_batches


def split_batch(batch: Batch, num_rows: int) -> list[Batch]:
    """Split a collated batch into views of at most `num_rows` rows; padding is not removed.

    Args:
        batch: Tensors by name, all with the rows as dimension 0.
        num_rows: Maximum number of rows per piece.

    Returns:
        The pieces; the batch itself if it is small enough, or if its tensors have different numbers of rows.
    """
    if is_packed(batch):
        return split_packed(batch, num_rows)
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in batch.values()}
    total = max(sizes, default=0)
    if total <= num_rows or len(sizes) > 1:
        return [batch]
    return [
        {name: tensor[start : start + num_rows] for name, tensor in batch.items()}
        for start in range(0, total, num_rows)
    ]


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """Return the fraction of token positions that are padding, if every batch is padded to its longest row."""
    num_tokens = sum(lengths[row] for batch in batches for row in batch)
    num_positions = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches if batch)
    return 1 - num_tokens / num_positions if num_positions else 0.0
