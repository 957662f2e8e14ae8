"""The area under the ROC curve from scores of any scale, added batch by batch and process by process.

Scores are kept with how many positive and negative rows have them, so that the result is exact. Only where a label has
more distinct scores than memory is meant for are neighbours put together, and then count as ties.
"""

import torch
from torch import Tensor

_MOST_SCORES, _FEWEST_GROUPS = 2**19, 2**13
_MOST_PENDING, _FEWEST_ROWS_PENDING = 2**20, 2**12
_LABEL, _SCORE, _POSITIVE, _NEGATIVE = range(4)  # columns of a table


class RankedScores:
    """How many positive and negative rows have which score, for each of several labels.

    Args:
        num_labels: How many scores a row has.
        num_groups: Distinct scores of a label that are kept apart. Beyond, scores are put together so that each group
            has a like share of the rows: the area of a label is then off by at most 1 / `num_groups`, and in practice
            by much less, since rows of one group count as ties. By default 524,288 for all labels together, and at
            least 8,192 for each.
        num_pending: Scores that wait on their device before the host takes them in; by default a million for all labels
            together, and at least 4,096 for each.
    """

    def __init__(self, num_labels: int, num_groups: int | None = None, num_pending: int | None = None) -> None:
        self._num_labels = num_labels
        self._num_groups = num_groups or max(_MOST_SCORES // num_labels, _FEWEST_GROUPS)
        self._max_pending = num_pending or max(_MOST_PENDING, num_labels * _FEWEST_ROWS_PENDING)
        self._pending: list[tuple[Tensor, Tensor]] = []
        self._num_pending = 0
        self._table = torch.empty(0, 4, dtype=torch.float64)

    def add(self, scores: Tensor, are_positive: Tensor) -> None:
        """Take in scores of (rows, labels). They are read from their device when `num_pending` are there."""
        lowest = -torch.inf
        self._pending.append((scores.nan_to_num(lowest, torch.inf, -torch.inf).detach(), are_positive.bool()))
        self._num_pending += scores.numel()
        if self._num_pending >= self._max_pending:
            self._table = _grouped(self.table(), self._num_labels, self._num_groups)

    def table(self) -> Tensor:
        """Rows of (label, score, number of positives, number of negatives), sorted, each score of a label once."""
        parts = [self._table]
        for scores, are_positive in self._pending:
            labels = torch.arange(self._num_labels, dtype=torch.float64).expand(scores.shape)
            positives = are_positive.cpu().double()
            columns = (labels, scores.cpu().double(), positives, 1 - positives)
            parts.append(torch.stack([column.flatten() for column in columns], dim=1))
        if self._pending:
            self._table = _distinct(torch.cat(parts))
            self._pending, self._num_pending = [], 0
        return self._table

    def replace(self, tables: Tensor) -> None:
        """Go on from the tables of several processes, one below the other."""
        self._pending, self._num_pending = [], 0
        self._table = _distinct(tables)

    def areas(self) -> Tensor:
        """The area of each label that has both positive and negative rows: the share of pairs that are in order."""
        table = self.table()
        positives, negatives = _label_totals(table, self._num_labels)
        in_table = table[:, _NEGATIVE]
        before_label = negatives.cumsum(0) - negatives
        label = table[:, _LABEL].long()
        below = in_table.cumsum(0) - in_table / 2 - before_label[label]
        ordered = torch.zeros_like(positives).index_add_(0, label, table[:, _POSITIVE] * below)
        num_pairs = positives * negatives
        return (ordered / num_pairs)[num_pairs > 0]


def _distinct(table: Tensor) -> Tensor:
    """The table sorted by label and score, with equal scores of a label in one row."""
    table = table[table[:, _SCORE].argsort()]
    table = table[table[:, _LABEL].argsort(stable=True)]
    return _merged(table, table[:, : _SCORE + 1])


def _grouped(table: Tensor, num_labels: int, num_groups: int) -> Tensor:
    """A sorted table in which no label has more than about `num_groups` rows.

    The rows of a label are cut at equal shares of its positives and negatives together. A group with the shares p and n
    of them hides at most p · n of the pairs, and all groups together at most 1 / `num_groups`.
    """
    label = table[:, _LABEL].long()
    num_rows = torch.bincount(label, minlength=num_labels)
    if not (num_rows > num_groups).any():
        return table
    positives, negatives = (total.clamp(min=1) for total in _label_totals(table, num_labels))
    mass = table[:, _POSITIVE] / positives[label] + table[:, _NEGATIVE] / negatives[label]
    total = torch.zeros_like(positives).index_add_(0, label, mass)
    mass = mass / total[label]  # of each label 1
    share = (mass.cumsum(0) - mass - label).clamp(0, 1)
    number = torch.arange(len(table)) - (num_rows.cumsum(0) - num_rows)[label]
    group = torch.where(num_rows[label] > num_groups, (share * num_groups).long(), number)
    return _merged(table, torch.stack([label, group], dim=1))


def _merged(table: Tensor, keys: Tensor) -> Tensor:
    """One row for each run of equal keys: the score of the middle row, and the sums of the counts."""
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
