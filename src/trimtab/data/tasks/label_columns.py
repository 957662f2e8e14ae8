"""Readers of labels: one label in a column, a list of labels in a column, or one column per label."""

from collections.abc import Sequence
from typing import Any

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Problem
from trimtab.data.tasks.columns import is_missing, list_values, require
from trimtab.data.tasks.labels import LabelSet, as_flag, collect_labels, is_multi_hot
from trimtab.errors import DataError


class OneLabel:
    """A column with one label per row.

    Attributes (of every reader):
        labels: The set of labels.
        several: Whether a row may have several labels, or none.
        as_role: The column or columns, as in a recipe.
    """

    several = False

    def __init__(self, column: str, labels: LabelSet) -> None:
        self.as_role = column
        self.labels = labels

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing or unknown label."""
        return _unknown(rows.columns[require(rows, self.as_role, "data.label")][index], self.as_role, self.labels)

    def values(self, rows: Rows) -> list[int]:
        """Return the label index of each checked row."""
        numbers = [self.labels.number(value) for value in rows.columns[self.as_role]]
        return [number for number in numbers if number is not None]


class LabelList:
    """A column with a list of labels per row, or with a list of one 0 or 1 per label (multi-hot)."""

    several = True

    def __init__(self, column: str, labels: LabelSet, *, multi_hot: bool) -> None:
        self.as_role = column
        self.labels = labels
        self._multi_hot = multi_hot

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a value that is not a list of labels."""
        column, value = self.as_role, rows.columns[require(rows, self.as_role, "data.label")][index]
        if not isinstance(value, list | tuple):
            return f"column {column!r} contains {value!r}, expected a list of labels", "write a list"
        if self._multi_hot:
            if len(value) == len(self.labels) and all(as_flag(single) is not None for single in value):
                return None
            return f"column {column!r} contains {value!r}", f"write {len(self.labels)} numbers, each 0 or 1"
        return next(filter(None, (_unknown(single, column, self.labels) for single in value)), None)

    def values(self, rows: Rows) -> list[list[float]]:
        """Return one 0 or 1 per label for each checked row."""
        if self._multi_hot:
            return [[float(single) for single in value] for value in rows.columns[self.as_role]]
        hot: list[list[float]] = []
        for value in rows.columns[self.as_role]:
            present = {self.labels.number(single) for single in value}
            hot.append([float(number in present) for number in range(len(self.labels))])
        return hot


class FlagColumns:
    """One column per label, which says whether a row has it."""

    several = True

    def __init__(self, columns: Sequence[str]) -> None:
        self.as_role = list(columns)
        self.labels = LabelSet(columns)

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a value that is neither 0 nor 1."""
        for name in self.as_role:
            value = rows.columns[require(rows, name, "data.label")][index]
            if as_flag(value) is None:
                return f"column {name!r} contains {value!r}, expected 0 or 1", "write 0 or 1"
        return None

    def values(self, rows: Rows) -> list[list[float]]:
        """Return one 0 or 1 per label for each checked row."""
        flags = [[float(as_flag(value) or 0) for value in rows.columns[name]] for name in self.as_role]
        return [list(row) for row in zip(*flags, strict=True)]


LabelColumns = OneLabel | LabelList | FlagColumns


def read_labels(rows: Rows, columns: Sequence[str]) -> LabelColumns:
    """Choose the reader for the labels of these rows.

    Args:
        rows: The training rows.
        columns: The label column, or one column per label; all exist.

    Raises:
        DataError: If the column contains no labels.
    """
    if len(columns) > 1:
        return FlagColumns(columns)
    column = columns[0]
    values = rows.columns[column]
    known = None
    if column in rows.label_names:
        known = LabelSet(rows.label_names[column], integers_are_indices=True)
    if not any(isinstance(value, list | tuple) for value in values):
        return OneLabel(column, known or collect_labels(values, column, rows.origin))
    if not is_multi_hot(values):
        return LabelList(column, known or collect_labels(values, column, rows.origin), multi_hot=False)
    num_labels = next(len(value) for value in values if isinstance(value, list | tuple))
    if known is not None and len(known) != num_labels:
        raise DataError(
            f"{rows.origin}: column {column!r} has {num_labels} numbers per row, but there are {len(known)} labels "
            f"({list_values(known.names)})",
            "write one number per label",
        )
    return LabelList(column, known or LabelSet([str(number) for number in range(num_labels)]), multi_hot=True)


def read_labels_of_model(rows: Rows, columns: Sequence[str], names: Sequence[str], *, several: bool) -> LabelColumns:
    """Choose the reader for the labels of rows that a trained model is evaluated on.

    Args:
        rows: The rows; they may have some of the labels only.
        columns: The label column, or one column per label; all exist.
        names: The labels of the model, in the order of its outputs.
        several: Whether the model predicts several labels per row.

    Raises:
        DataError: If the rows have one label each and the model predicts several, or the other way round.
    """
    if len(columns) > 1:
        if not several or set(columns) != set(names):
            raise DataError(
                f"{rows.origin} has one column per label ({list_values(columns)}), the labels of the model are "
                f"{list_values(names)}",
                "set data.label to one column with the label" if not several else "set data.label to these columns",
            )
        return FlagColumns(names)
    column = columns[0]
    values = rows.columns[column]
    has_lists = any(isinstance(value, list | tuple) for value in values)
    if has_lists != several:
        found, wanted = ("lists", "one label per row") if has_lists else ("single labels", "a list of labels per row")
        raise DataError(
            f"{rows.origin}: column {column!r} contains {found}, but the model predicts "
            f"{'several labels' if several else 'one label'} per row",
            f"write {wanted}, or set data.label to another column",
        )
    labels = LabelSet(names, owner="the model")
    own_names = rows.label_names.get(column)
    if own_names is not None and not set(own_names) <= set(names):
        # The names of the source are others (LABEL_0), or unknown: its integers can only be indices.
        labels = LabelSet(names, owner="the model", integers_are_indices=True)
    if not several:
        return OneLabel(column, labels)
    multi_hot = is_multi_hot(values) and any(len(value) == len(names) for value in values)
    return LabelList(column, labels, multi_hot=multi_hot)


def _unknown(value: Any, column: str, labels: LabelSet) -> Problem:
    if labels.number(value) is not None:
        return None
    if is_missing(value):
        return f"column {column!r} is empty", "write a label or remove the row"
    if value == -1:
        return (
            f"column {column!r} contains -1, which marks rows without a label (test splits on the Hub often have none)",
            "use a split that has labels",
        )
    cure = "add training rows with this label" if labels.owner == "the training rows" else "remove the row"
    return (
        f"label {value!r} in column {column!r} is not one of the {len(labels)} labels of {labels.owner} "
        f"({list_values(labels.names)})",
        f"correct it or {cure}",
    )
