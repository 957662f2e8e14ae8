"""Which rows go into which batch: a pure function of (seed, epoch), with rows of like length together.

Rows are shuffled, sorted by length within windows of many batches, cut into batches, and the batches shuffled again: so
little is padded, and the order stays random.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import islice

import torch

Batch = dict[str, torch.Tensor]


def epoch_batches(
    lengths: Sequence[int] | torch.Tensor,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    group_by_length: bool = True,
    window_batches: int = 50,
    shuffle: bool = True,
    drop_last: bool = False,
) -> list[list[int]]:
    """The batches of one epoch: every row exactly once.

    One batch is short where the rows do not divide evenly. Grouped and shuffled, it holds rows of any length and comes
    at any time, so that no length is trained with larger steps than the others; otherwise it comes last.

    Args:
        lengths: The number of tokens of each row.
        batch_size: Rows in a batch.
        seed: With `epoch`, decides the order.
        epoch: Counted from 0.
        group_by_length: Put rows of like length together; without a shuffle all rows are sorted, the longest first.
        window_batches: How many batches are sorted together.
        shuffle: Whether the order is random.
        drop_last: Leave out as many rows, of any length, as keep every batch full.
    """
    if batch_size < 1 or window_batches < 1:
        raise ValueError(f"batch_size is {batch_size} and window_batches {window_batches}; both must be at least 1")
    size_of = torch.as_tensor(lengths, dtype=torch.int64)
    num_rows = len(size_of)
    generator = _generator(seed, epoch)
    order = torch.randperm(num_rows, generator=generator) if shuffle else torch.arange(num_rows)
    if drop_last:
        order = order[: num_rows - num_rows % batch_size]
    if not group_by_length:
        return _cut(order.tolist(), batch_size)
    if not shuffle:
        return _cut(order[size_of[order].argsort(stable=True, descending=True)].tolist(), batch_size)
    by_window = torch.arange(len(order)) // (window_batches * batch_size)
    # Two stable sorts order by window, then length; rows of one length stay in the order of the shuffle.
    order = order[_argsort_by(by_window, size_of[order])]
    batches = _cut_with_short_anywhere(order.tolist(), batch_size, window_batches, generator)
    return [batches[index] for index in torch.randperm(len(batches), generator=generator).tolist()]


def _generator(seed: int, epoch: int) -> torch.Generator:
    """Neighbouring seeds and epochs give unrelated orders, and (1, 2) another one than (2, 1)."""
    digest = hashlib.blake2b(f"batches {seed} {epoch}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def _argsort_by(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    by_second = second.argsort(stable=True)
    return by_second[first[by_second].argsort(stable=True)]


def _cut(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _cut_with_short_anywhere(
    rows: list[int], batch_size: int, window_batches: int, generator: torch.Generator
) -> list[list[int]]:
    """Cut into batches; the short one is taken at a random place of the last window, not always at its longest rows."""
    num_full, num_left = divmod(len(rows), batch_size)
    if not num_left:
        return _cut(rows, batch_size)
    num_full_in_last = num_full % window_batches
    at = num_full - int(torch.randint(num_full_in_last + 1, (), generator=generator))
    split = at * batch_size
    short = rows[split : split + num_left]
    return [*_cut(rows[:split], batch_size), short, *_cut(rows[split + num_left :], batch_size)]


class LengthGroupedBatches:
    """A batch sampler for a DataLoader that yields the micro-batches of the optimizer's batches.

    The rows of an optimizer batch are sorted by length where they are grouped, and each micro-batch takes consecutive
    ones.

    Args:
        lengths: The number of tokens of each row.
        batch_size: Rows that the optimizer sees in a step.
        micro_batch_size: Rows that the model sees at once; the last micro-batch of a batch may be smaller.
        seed: With the epoch, decides the order.
        group_by_length: Put rows of like length together.
        shuffle: Whether the order is random.
        limit_batches: Only so many optimizer batches an epoch.
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
        self.epoch = 0
        self._drawn: tuple[int, list[list[list[int]]]] | None = None
        self._sizes: list[int] = []  # asked for at every micro-batch
        self._num_micro_batches = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order the next iteration follows."""
        self.epoch = epoch

    def windows(self) -> list[list[list[int]]]:
        """The optimizer batches of the current epoch, each as its micro-batches; drawn once."""
        if self._drawn is None or self._drawn[0] != self.epoch:
            batches = epoch_batches(
                self.lengths,
                self.batch_size,
                seed=self.seed,
                epoch=self.epoch,
                group_by_length=self.group_by_length,
                shuffle=self.shuffle,
            )
            self._keep(self.epoch, batches[: self.limit_batches])
        assert self._drawn is not None
        return self._drawn[1]

    def _keep(self, epoch: int, batches: list[list[int]]) -> None:
        self._drawn = epoch, [_cut(rows, self.micro_batch_size) for rows in batches]
        self._sizes = [len(window) for window in self._drawn[1]]
        self._num_micro_batches = sum(self._sizes)

    def recut(self, micro_batch_size: int) -> None:
        """From the next iteration on: the same batches in micro-batches of another size."""
        if micro_batch_size < 1:
            raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
        self.micro_batch_size = micro_batch_size
        if self._drawn is not None:
            epoch, windows = self._drawn
            self._keep(epoch, [[row for micro_batch in window for row in micro_batch] for window in windows])

    def worst_rows(self, other_lengths: Sequence[int] | None = None) -> list[int]:
        """The rows of a micro-batch that needs as much memory as any of the run: the most rows, the longest ones.

        In every epoch the longest row of all comes in some micro-batch, which is padded to it. The longest rows
        together have the shape of that one (at least: it may be the rest of a batch), and as little padding as any.

        Args:
            other_lengths: What else is padded, on its own: the labels of a model with encoder and decoder. Then half
                of the rows are those that are longest there.
        """
        if self.limit_batches is not None:  # only the rows of few batches come at all
            micro_batches = [rows for window in self.windows() for rows in window]
            return max(micro_batches, key=lambda rows: (len(rows) * self._longest(rows), self._longest(rows)))
        num_rows = min(self.micro_batch_size, self.batch_size, len(self.lengths))
        longest = self.lengths.argsort(stable=True, descending=True).tolist()
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
        """The number of micro-batches of each optimizer batch of the current epoch."""
        self.windows()
        return self._sizes

    def __iter__(self) -> Iterator[list[int]]:
        for window in self.windows():
            yield from window

    def __len__(self) -> int:
        self.windows()
        return self._num_micro_batches


def cut_rows(batch: Batch, num_rows: int) -> list[Batch]:
    """A collated batch in pieces of at most so many rows each; padding stays, and nothing is copied.

    Args:
        batch: Tensors by name, one row of each for every row of the batch.
        num_rows: The most rows of a piece.

    Returns:
        The pieces; the batch itself where it is small enough, or where its tensors have no rows in common.
    """
    sizes = {len(tensor) if tensor.dim() else 0 for tensor in batch.values()}
    total = max(sizes, default=0)
    if total <= num_rows or len(sizes) > 1:
        return [batch]
    return [
        {name: tensor[start : start + num_rows] for name, tensor in batch.items()}
        for start in range(0, total, num_rows)
    ]


def padding_share(lengths: Sequence[int], batches: Sequence[Sequence[int]]) -> float:
    """The share of a run's token positions that would be padding, if every batch is padded to its longest row."""
    num_tokens = sum(lengths[row] for batch in batches for row in batch)
    num_positions = sum(max(lengths[row] for row in batch) * len(batch) for batch in batches if batch)
    return 1 - num_tokens / num_positions if num_positions else 0.0
