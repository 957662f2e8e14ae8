"""Area under the ROC curve from scores of any scale, accumulated over batches and ranks.

Each distinct score is kept with its number of positive and negative rows, so the result is exact. Only if a label has
more distinct scores than the memory limit are neighbouring scores merged; they then count as ties.
"""

import torch
from torch import Tensor

_MAX_SCORES, _MIN_GROUPS = 2**19, 2**13
_MAX_PENDING, _MIN_ROWS_PENDING = 2**20, 2**12
_LABEL, _SCORE, _POSITIVE, _NEGATIVE = range(4)  # columns of a table


class RankedScores:
    """Numbers of positive and negative rows by score, for each of several labels.

    Args:
        num_labels: Scores per row.
        num_groups: Distinct scores kept per label. Beyond that, scores are merged into groups with about the same
            number of rows: the error of the area is then at most 1 / `num_groups`, in practice much less, since rows of
            a group count as ties. By default 524,288 for all labels together, and at least 8,192 for each.
        num_pending: Scores that stay on the device before they are copied to the host; by default a million for all
            labels together, and at least 4,096 for each.
    """

    def __init__(self, num_labels: int, num_groups: int | None = None, num_pending: int | None = None) -> None:
        self._num_labels = num_labels
        self._num_groups = num_groups or max(_MAX_SCORES // num_labels, _MIN_GROUPS)
        self._max_pending = num_pending or max(_MAX_PENDING, num_labels * _MIN_ROWS_PENDING)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0
        self._table = torch.empty(0, 4, dtype=torch.float64)

    def add(self, scores: Tensor, are_positive: Tensor) -> None:
        """Add scores of shape [rows, labels]. Once `num_pending` are pending, they are copied to the host (a sync)."""
        # NaN ranks last
        self._pending.append((scores.nan_to_num(-torch.inf, torch.inf, -torch.inf).detach(), are_positive.bool()))
        self._num_pending += scores.numel()
        if self._num_pending >= self._max_pending:
            self._table = _merge_groups(self.table(), self._num_labels, self._num_groups)

    def table(self) -> Tensor:
        """Return rows of (label, score, positives, negatives), sorted, with each score of a label once."""
        parts = [self._table]
        for scores, are_positive in self._pending:
            labels = torch.arange(self._num_labels, dtype=torch.float64).expand(scores.shape)
            positives = are_positive.cpu().double()
            columns = (labels, scores.cpu().double(), positives, 1 - positives)
            parts.append(torch.stack([column.flatten() for column in columns], dim=1))
        if self._pending:
            self._table = _merge_equal(torch.cat(parts))
            self._pending, self._num_pending = [], 0
        return self._table

    def replace(self, tables: Tensor) -> None:
        """Replace the scores by the concatenated tables of all ranks."""
        self._pending, self._num_pending = [], 0
        self._table = _merge_equal(tables)

    def areas(self) -> Tensor:
        """Return the area (fraction of correctly ordered pairs) of each label with positive and negative rows."""
        table = self.table()
        positives, negatives = _label_totals(table, self._num_labels)
        in_table = table[:, _NEGATIVE]
        before_label = negatives.cumsum(0) - negatives
        label = table[:, _LABEL].long()
        below = in_table.cumsum(0) - in_table / 2 - before_label[label]
        ordered = torch.zeros_like(positives).index_add_(0, label, table[:, _POSITIVE] * below)
        num_pairs = positives * negatives
        return (ordered / num_pairs)[num_pairs > 0]


def _merge_equal(table: Tensor) -> Tensor:
    """Sort the table by label and score, and merge equal scores of a label."""
    table = table[table[:, _SCORE].argsort()]
    table = table[table[:, _LABEL].argsort(stable=True)]
    return _merge_runs(table, table[:, : _SCORE + 1])


def _merge_groups(table: Tensor, num_labels: int, num_groups: int) -> Tensor:
    """Merge neighbouring scores of a sorted table to about `num_groups` rows per label.

    Groups have equal sums of the fractions of positives and of negatives. A group with the fractions p and n hides the
    order of at most p · n of the pairs, and all groups together of at most 1 / `num_groups`.
    """
    label = table[:, _LABEL].long()
    num_rows = torch.bincount(label, minlength=num_labels)
    if not (num_rows > num_groups).any():
        return table
    positives, negatives = (total.clamp(min=1) for total in _label_totals(table, num_labels))
    mass = table[:, _POSITIVE] / positives[label] + table[:, _NEGATIVE] / negatives[label]
    total = torch.zeros_like(positives).index_add_(0, label, mass)
    mass = mass / total[label]  # sums to 1 per label
    share = (mass.cumsum(0) - mass - label).clamp(0, 1)
    number = torch.arange(len(table)) - (num_rows.cumsum(0) - num_rows)[label]
    group = torch.where(num_rows[label] > num_groups, (share * num_groups).long(), number)
    return _merge_runs(table, torch.stack([label, group], dim=1))


def _merge_runs(table: Tensor, keys: Tensor) -> Tensor:
    """Merge each run of equal keys to one row: the score of the middle row, and the sums of the counts."""
    if not len(table):
        return table
    begins = torch.cat([torch.tensor([True]), (keys[1:] != keys[:-1]).any(dim=1)])
    first = begins.nonzero().flatten()
    last = torch.cat([first[1:], torch.tensor([len(table)])]) - 1
    merged = table[(first + last) // 2]
    counts = torch.zeros(len(first), 2, dtype=table.dtype)
    merged[:, _POSITIVE:] = counts.index_add_(0, begins.cumsum(0) - 1, table[:, _POSITIVE:])
    return merged


def _label_totals(table: Tensor, num_labels: int) -> tuple[Tensor, Tensor]:
    counts = torch.zeros(num_labels, 2, dtype=table.dtype)
    counts.index_add_(0, table[:, _LABEL].long(), table[:, _POSITIVE:])
    return counts[:, 0], counts[:, 1]
