"""Packed batches: rows one after another in one sequence of tokens, without padding.

A packed batch has these entries:

- `input_ids`, `position_ids` and `token_type_ids` of shape (1, tokens); positions start at 0 in every row. Labels of
  tokens have the same shape, labels of rows do not change.
- `cu_seq_lens_q`: the first token of every row, then of the filler, then the number of all tokens (int32). The last row
  is always the filler: tokens that round the batch up to a size that repeats. It may be empty, and is never trained on.
- `max_length_q`: an upper bound of the length of a row or of the filler, as an int.
- `max_row_length`: an upper bound of the length of a row, without the filler, as an int.
- `row_length`, if it was requested, all rows are equally long and there is no filler: the length of a row, as an int.

The last four are arguments that transformers passes on to an attention function.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from trimtab.data.tasks.padding import IGNORED

Batch = dict[str, Any]
ROW_STARTS = "cu_seq_lens_q"
MAX_LENGTH = "max_length_q"
MAX_ROW_LENGTH = "max_row_length"
ROW_LENGTH = "row_length"


# ---------------------------------------------------------------------- dividing rows into micro-batches


def split_by_tokens(
    rows: Sequence[int], lengths: torch.Tensor, max_tokens: int, max_rows: int | None = None
) -> list[list[int]]:
    """Divide rows into micro-batches by best fit, longest rows first.

    A row that is longer than `max_tokens` has a separate micro-batch. Rows of a micro-batch keep their order, and
    micro-batches are in the order of their first rows.

    Args:
        rows: Numbers of rows.
        lengths: Number of tokens of every row of the dataset.
        max_tokens: Maximum number of tokens in a micro-batch.
        max_rows: Maximum number of rows in a micro-batch; None means no limit.
    """
    sizes: list[int] = lengths[list(rows)].tolist()
    bins: list[list[int]] = []  # positions in `rows`
    room: list[int] = []
    for position in sorted(range(len(rows)), key=lambda position: -sizes[position]):
        fitting = [(left, number) for number, left in enumerate(room) if left >= sizes[position]]
        if not fitting:
            bins.append([])
            room.append(max_tokens)
        number = min(fitting)[1] if fitting else len(bins) - 1
        bins[number].append(position)
        room[number] -= sizes[position]
        if len(bins[number]) == max_rows:
            room[number] = -1
    return [[rows[position] for position in positions] for positions in sorted(map(sorted, bins))]


class SharedRows(list[int]):
    """The rows of a micro-batch over all processes.

    Attributes:
        rows_of_all: How many consecutive rows each process takes.
    """

    rows_of_all: tuple[int, ...]

    def __init__(self, shares: Sequence[Sequence[int]]) -> None:
        super().__init__(row for share in shares for row in share)
        self.rows_of_all = tuple(map(len, shares))


def share_by_tokens(
    rows: Sequence[int], lengths: torch.Tensor, max_tokens: int, num_processes: int, max_rows: int | None = None
) -> list[SharedRows]:
    """Divide rows as evenly as possible into micro-batches of several processes, each with at most `max_tokens` tokens.

    Args:
        rows: Numbers of rows.
        lengths: Number of tokens of every row of the dataset.
        max_tokens: Maximum number of tokens in a micro-batch of one process.
        num_processes: Processes that take a share of every micro-batch.
        max_rows: Maximum number of rows in a micro-batch of one process; None means no limit.
    """
    shares = split_by_tokens(rows, lengths, max_tokens, max_rows)
    num_shares = -(-len(shares) // num_processes) * num_processes
    even = _evenly(rows, lengths, num_shares)
    most_rows = max_rows or len(rows)
    if all(int(lengths[share].sum()) <= max_tokens and len(share) <= most_rows for share in even):
        shares = even
    # processes wait for each other at the end of a window: shares of similar size belong together
    shares = sorted(shares, key=lambda share: -int(lengths[share].sum()))
    shares += [[]] * (num_shares - len(shares))
    return [SharedRows(shares[start : start + num_processes]) for start in range(0, num_shares, num_processes)]


def _evenly(rows: Sequence[int], lengths: torch.Tensor, num_shares: int) -> list[list[int]]:
    """Give every row, longest first, to the share with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for row in sorted(rows, key=lambda row: -int(lengths[row])):
        number = totals.index(min(totals))
        shares[number].append(row)
        totals[number] += int(lengths[row])
    return shares


def choose_sizes(totals: Sequence[int], max_filler: float = 0.03, max_sizes: int = 32) -> tuple[int, ...]:
    """Choose few sizes to which numbers of tokens are rounded up.

    The number of sizes is the smallest, up to `max_sizes`, for which filler is at most `max_filler` of all tokens;
    among these, the sizes with the least filler are chosen.

    Args:
        totals: Tokens of micro-batches, without filler.
        max_filler: Largest share of filler.
        max_sizes: Largest number of sizes.

    Returns:
        The sizes in ascending order; the largest is that of the largest micro-batch.
    """
    if not totals:
        return ()
    tokens = torch.tensor(sorted(totals))
    sizes = _possible_sizes(tokens)
    # Micro-batches up to a size, and their tokens: filler between two sizes is a difference of these.
    counts = torch.searchsorted(tokens, sizes, right=True)
    sums = torch.cat([torch.zeros(1, dtype=torch.int64), tokens.cumsum(0)])[counts]
    between = (counts[None] - counts[:, None]) * sizes[None] - (sums[None] - sums[:, None])
    between = between.double().masked_fill_(between.new_ones(between.shape).tril() > 0, math.inf)
    filler = (counts * sizes - sums).double()  # the filler if there were one size, for each size
    previous: list[torch.Tensor] = []
    while filler[-1] > max_filler * int(tokens.sum()) and len(previous) + 1 < min(max_sizes, len(sizes)):
        filler, best = (filler[:, None] + between).min(0)
        previous.append(best)
    chosen = [len(sizes) - 1]
    for best in reversed(previous):
        chosen.append(int(best[chosen[-1]]))
    return tuple(sorted(int(sizes[number]) for number in set(chosen)))


def _possible_sizes(tokens: torch.Tensor) -> torch.Tensor:
    """Aligned numbers of tokens, and the largest one unchanged; if there are many, evenly spaced ones."""
    aligned = (tokens + _ALIGNMENT - 1).div(_ALIGNMENT, rounding_mode="floor") * _ALIGNMENT
    sizes: torch.Tensor = torch.unique_consecutive(aligned.clamp(max=int(tokens[-1])))  # tokens are sorted
    if len(sizes) > _MOST_POSSIBLE:
        sizes = sizes[torch.linspace(0, len(sizes) - 1, _MOST_POSSIBLE).long()]
    return sizes


_ALIGNMENT = 8  # tokens: matrix products in half precision are fast for multiples of it
_MOST_POSSIBLE = 512  # sizes to choose from


def rounded_up(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of `sizes` that is large enough; `num_tokens` if none is."""
    return min((size for size in sizes if size >= num_tokens), default=num_tokens)


# ---------------------------------------------------------------------- from padded to packed


class PackedCollate:
    """Collate rows into a packed batch.

    Args:
        collate: Makes a padded batch of rows, with an attention mask.
        shifts_labels: Whether a token is scored against the label of the next one. The first token of a row is then
            never a label: it would be predicted from the row before it.
        pad_id: The token that filler consists of.
        find_sizes: Returns the numbers of tokens that batches are rounded up to; empty for no filler.
        max_length: An upper bound for the length of rows in all batches, on which captured graphs depend. Filler
            between two sizes may be longer. None uses a separate bound for each batch.
        num_starts: Entries of `cu_seq_lens_q` in batches with labels of tokens: empty rows are added before the filler.
            None uses the number of rows plus two.
        marks_equal_rows: Whether batches of equally long rows have a `row_length`.
    """

    def __init__(
        self,
        collate: Callable[..., Batch],
        shifts_labels: bool,
        pad_id: int,
        find_sizes: Callable[[], Sequence[int]] = tuple,
        *,
        max_length: int | None = None,
        num_starts: int | None = None,
        marks_equal_rows: bool = False,
    ) -> None:
        self._collate = collate
        self._shifts_labels = shifts_labels
        self._pad_id = pad_id
        self._find_sizes = find_sizes
        self._max_length = max_length
        self._num_starts = num_starts
        self._marks_equal_rows = marks_equal_rows

    def __call__(self, examples: list[dict[str, torch.Tensor]], num_tokens: int | None = None) -> Batch:
        """Return rows as one batch, with filler up to `num_tokens` if given."""
        batch = self._collate(examples)
        total = int(batch["attention_mask"].sum())
        sizes = self._find_sizes()
        size = rounded_up(total, sizes) if num_tokens is None else max(total, num_tokens)
        packed = pack_batch(batch, size, self._pad_id, self._shifts_labels)
        if self._marks_equal_rows and batch["attention_mask"].numel() == size == total:
            packed[ROW_LENGTH] = batch["attention_mask"].shape[1]
        if self._max_length is not None:
            gaps = (size - smaller for smaller, size in pairwise(sizes))
            packed[MAX_LENGTH] = max(packed[MAX_LENGTH], self._max_length, *gaps)
            packed[MAX_ROW_LENGTH] = max(packed[MAX_ROW_LENGTH], self._max_length)
        if self._num_starts is not None and _is_of_tokens(packed["labels"], packed["input_ids"].shape):
            packed[ROW_STARTS] = _with_empty_rows(packed[ROW_STARTS], self._num_starts)
        return packed


def _with_empty_rows(starts: torch.Tensor, num_starts: int) -> torch.Tensor:
    return torch.cat([starts[:-1], starts[-2].repeat(num_starts - len(starts)), starts[-1:]])


class RoundedCollate:
    """Collate rows into a padded batch whose length is one of few sizes.

    Args:
        collate: Makes a padded batch of rows, with an attention mask.
        pad_id: The token that padding consists of.
        find_sizes: Returns the lengths that batches are rounded up to.
    """

    def __init__(self, collate: Callable[..., Batch], pad_id: int, find_sizes: Callable[[], Sequence[int]]) -> None:
        self._collate = collate
        self._pad_id = pad_id
        self._find_sizes = find_sizes

    def __call__(self, examples: list[dict[str, torch.Tensor]]) -> Batch:
        """Return rows as one batch."""
        batch = self._collate(examples)
        shape = batch["attention_mask"].shape
        missing = rounded_up(shape[1], self._find_sizes()) - shape[1]
        if not missing:
            return batch
        return {
            name: functional.pad(value, (0, missing), value=_filler(name, self._pad_id))
            if _is_of_tokens(value, shape)
            else value
            for name, value in batch.items()
        }


def _is_of_tokens(value: Any, shape: torch.Size) -> bool:
    """Whether there is one value per token. Multiple labels of a row are floats, and may be as many as tokens."""
    return isinstance(value, torch.Tensor) and value.shape == shape and not value.is_floating_point()


def _filler(name: str, pad_id: int) -> int:
    return {"input_ids": pad_id, "labels": IGNORED}.get(name, 0)


def pack_batch(batch: Batch, size: int, pad_id: int, shifts_labels: bool) -> Batch:
    """Remove the padding of a batch that is padded on the right.

    Args:
        batch: The padded batch; `attention_mask` marks its tokens.
        size: Number of tokens of the result, including filler.
        pad_id: The token that filler consists of.
        shifts_labels: As in `PackedCollate`.
    """
    mask = batch["attention_mask"]
    lengths = mask.sum(dim=1)
    num_rows, longest = len(mask), int(lengths.max())
    starts = torch.full((num_rows + 2,), size, dtype=torch.int32)
    starts[0] = 0
    starts[1:-1] = lengths.cumsum(0)
    num_tokens = int(starts[-2])
    is_token = mask.flatten().nonzero().flatten()
    positions = torch.arange(mask.shape[1]).expand(mask.shape)
    packed: Batch = {}
    for name, value in {**batch, "position_ids": positions}.items():
        if name == "attention_mask":
            continue
        if _is_of_tokens(value, mask.shape):
            tokens = value.new_full((size,), _filler(name, pad_id))
            torch.index_select(value.reshape(-1), 0, is_token, out=tokens[:num_tokens])
            if name == "labels" and shifts_labels:
                tokens[starts[:num_rows].long()] = IGNORED
            value = tokens[None]
        packed[name] = value
    return packed | {ROW_STARTS: starts, MAX_LENGTH: max(longest, size - num_tokens), MAX_ROW_LENGTH: longest}


# ---------------------------------------------------------------------- the contents of a batch


def is_packed(batch: Batch) -> bool:
    """Whether a batch is packed."""
    return ROW_STARTS in batch


def count_rows(batch: Batch) -> int:
    """The number of rows of a packed or padded batch, including the empty ones that `PackedCollate` adds."""
    return len(batch[ROW_STARTS]) - 2 if is_packed(batch) else len(next(iter(batch.values())))


def count_filled_rows(batch: Batch) -> torch.Tensor | int:
    """The rows of a batch that have tokens; a tensor if the number is known only on the device."""
    return (batch[ROW_STARTS][:-1].diff() > 0).sum() if is_packed(batch) else count_rows(batch)


def count_tokens(batch: Batch) -> torch.Tensor | int:
    """The tokens of a batch without padding and filler; a tensor if the number is known only on the device."""
    if is_packed(batch):
        return batch[ROW_STARTS][-2]  # type: ignore[no-any-return]
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()  # type: ignore[no-any-return]
    return batch["input_ids"].numel()  # type: ignore[no-any-return]


def split_packed(batch: Batch, num_rows: int) -> list[Batch]:
    """Split a packed batch into pieces of at most `num_rows` rows, without filler. This is a host-device sync."""
    starts: list[int] = batch[ROW_STARTS].tolist()
    total, num_tokens = count_rows(batch), batch["input_ids"].shape[1]
    if total <= num_rows:
        return [batch]
    pieces = []
    for first in range(0, total, num_rows):
        last = min(first + num_rows, total)
        tokens, piece = slice(starts[first], starts[last]), {}
        for name, value in batch.items():
            if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
                value = value[:, tokens]
            elif name == ROW_STARTS:
                bounds = [start - starts[first] for start in starts[first : last + 1]]
                value = torch.tensor([*bounds, bounds[-1]], dtype=torch.int32, device=value.device)
            elif isinstance(value, torch.Tensor) and value.dim() and len(value) == total:
                value = value[first:last]
            piece[name] = value
        pieces.append(piece)
    return pieces
