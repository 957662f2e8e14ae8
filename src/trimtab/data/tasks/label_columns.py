"""Where the labels of a row stand: one label in a column, a list of labels in a column, or a column for each label."""

from collections.abc import Sequence
from typing import Any, Protocol

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Problem
from trimtab.data.tasks.columns import is_missing, listed, require
from trimtab.data.tasks.labels import LabelSet, as_flag, is_multi_hot, labels_of
from trimtab.errors import DataError


class LabelColumns(Protocol):
    """How labels are read from rows.

    Attributes:
        labels: The labels that there are.
        several: Whether a row may have several of them, or none.
        as_role: The column or columns, as a recipe writes them.
    """

    labels: LabelSet
    several: bool
    as_role: str | list[str]

    def problem(self, rows: Rows, index: int) -> Problem:
        """What is wrong with the label of a row."""
        ...

    def values(self, rows: Rows) -> list[int] | list[list[float]]:
        """For each checked row the number of its label, or a 0 or 1 for each label."""
        ...


class OneLabel:
    """A column with one label in each row."""

    several = False

    def __init__(self, column: str, labels: LabelSet) -> None:
        self.as_role: str | list[str] = column
        self.labels = labels
        self._column = column

    def problem(self, rows: Rows, index: int) -> Problem:
        """A label is missing or not known."""
        return _unknown(rows.columns[require(rows, self._column, "data.label")][index], self._column, self.labels)

    def values(self, rows: Rows) -> list[int]:
        """The number of each row's label."""
        numbers = [self.labels.number(value) for value in rows.columns[self._column]]
        return [number for number in numbers if number is not None]


class LabelList:
    """A column with a list of labels in each row, or with a list of a 0 or 1 for each label."""

    several = True

    def __init__(self, column: str, labels: LabelSet, *, multi_hot: bool) -> None:
        self.as_role: str | list[str] = column
        self.labels = labels
        self._column = column
        self._multi_hot = multi_hot

    def problem(self, rows: Rows, index: int) -> Problem:
        """There is no list, or it holds something that is no label."""
        value = rows.columns[require(rows, self._column, "data.label")][index]
        if not isinstance(value, list | tuple):
            return f"column {self._column!r} holds {value!r} where a list of labels is expected", "write a list there"
        if self._multi_hot:
            if len(value) == len(self.labels) and all(as_flag(single) is not None for single in value):
                return None
            return f"column {self._column!r} holds {value!r}", f"write {len(self.labels)} numbers, each 0 or 1"
        return next(filter(None, (_unknown(single, self._column, self.labels) for single in value)), None)

    def values(self, rows: Rows) -> list[list[float]]:
        """A 0 or 1 for each label."""
        if self._multi_hot:
            return [[float(single) for single in value] for value in rows.columns[self._column]]
        hot: list[list[float]] = []
        for value in rows.columns[self._column]:
            present = {self.labels.number(single) for single in value}
            hot.append([float(number in present) for number in range(len(self.labels))])
        return hot


class FlagColumns:
    """A column for each label that says whether a row has it."""

    several = True

    def __init__(self, columns: Sequence[str]) -> None:
        self.as_role: str | list[str] = list(columns)
        self.labels = LabelSet(columns)
        self._columns = list(columns)

    def problem(self, rows: Rows, index: int) -> Problem:
        """A column says neither yes nor no."""
        for name in self._columns:
            value = rows.columns[require(rows, name, "data.label")][index]
            if as_flag(value) is None:
                return f"column {name!r} holds {value!r} where 0 or 1 is expected", "write 0 or 1 there"
        return None

    def values(self, rows: Rows) -> list[list[float]]:
        """A 0 or 1 for each label."""
        flags = [[float(as_flag(value) or 0) for value in rows.columns[name]] for name in self._columns]
        return [list(row) for row in zip(*flags, strict=True)]


def read_labels(rows: Rows, asked: str | Sequence[str], label_names: Sequence[str] | None) -> LabelColumns:
    """How the labels of these rows are to be read.

    Args:
        rows: The training rows.
        asked: The column, or a column for each label.
        label_names: The labels in their order, where they are known beforehand.

    Raises:
        DataError: If a column is not there or holds no labels.
    """
    columns = [asked] if isinstance(asked, str) else list(asked)
    for name in columns:
        require(rows, name, "data.label")
    if len(columns) > 1:
        return FlagColumns(columns)
    column = columns[0]
    values = rows.columns[column]
    known = _known_labels(rows, column, label_names)
    if not any(isinstance(value, list | tuple) for value in values):
        return OneLabel(column, known or labels_of(values, column, rows.origin))
    if is_multi_hot(values):
        num_labels = next(len(value) for value in values if isinstance(value, list | tuple))
        if known is not None and len(known) != num_labels:
            raise DataError(
                f"{rows.origin}: column {column!r} holds {num_labels} numbers in each row, but there are "
                f"{len(known)} labels ({listed(known.names)})",
                "give a number for each label",
            )
        return LabelList(column, known or LabelSet([str(number) for number in range(num_labels)]), multi_hot=True)
    return LabelList(column, known or labels_of(values, column, rows.origin), multi_hot=False)


def _known_labels(rows: Rows, column: str, label_names: Sequence[str] | None) -> LabelSet | None:
    if label_names is not None:
        return LabelSet(label_names)
    if column in rows.label_names:
        return LabelSet(rows.label_names[column], whole_numbers_are_positions=True)
    return None


def _unknown(value: Any, column: str, labels: LabelSet) -> Problem:
    if labels.number(value) is not None:
        return None
    if is_missing(value):
        return f"column {column!r} is empty", "write a label there or remove the row"
    if value == -1:
        return (
            f"column {column!r} holds -1, the mark of rows without a label (test splits of the hub hide theirs)",
            "name a split that has labels",
        )
    return (
        f"label {value!r} in column {column!r} is not among the {len(labels)} labels of the training rows "
        f"({listed(labels.names)})",
        "add training rows with it or correct it",
    )
