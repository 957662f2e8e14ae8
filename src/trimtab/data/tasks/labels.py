"""The set of labels: which values there are, what they are called, and the number of each.

A label is known by its text, so that 1 in one file and "1" in another are the same label.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from trimtab.data.tasks.columns import is_missing, listed
from trimtab.errors import DataError

# Beyond these a column holds numbers or free text rather than classes.
MANY_LABELS = 1000
_WHOLE_NUMBER_LABELS = 100
_MOST_DIGITS = 1000  # Python makes no number of more than 4,300
_YES = {"1", "true", "yes"}
_NO = {"0", "false", "no"}


def label_key(value: Any) -> str | None:
    """The text by which a label is known, or None where a value cannot be a label."""
    if is_missing(value):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else None
    return value.strip() if isinstance(value, str) else None


class LabelSet:
    """The labels of a classification, in the order of their numbers.

    Args:
        names: What they are called.
        whole_numbers_are_positions: Whether a whole number in the data is the position of a name (so it is in the
            hub's class columns) rather than a name itself.
    """

    def __init__(self, names: Sequence[str], *, whole_numbers_are_positions: bool = False) -> None:
        self.names = list(names)
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._positions = {str(number): number for number in range(len(self.names))}
        self._positions_first = whole_numbers_are_positions

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any) -> int | None:
        """The number of a label, or None where it is not known."""
        key = label_key(value)
        if key is None:
            return None
        if self._positions_first and not isinstance(value, str):
            return self._positions.get(key)
        return self._numbers.get(key, self._positions.get(key) if self._knows_positions else None)

    @property
    def _knows_positions(self) -> bool:
        """Names that are numbers themselves (1 to 5 stars) must not be taken for positions as well."""
        return self._positions_first or not all(_is_whole_number(name) for name in self.names)


def labels_of(values: Iterable[Any], column: str, origin: str) -> LabelSet:
    """The set of labels that stands in a column; several labels of a row count one by one.

    Raises:
        DataError: If the values are no classes: too many, too few, or fractions.
    """
    keys: dict[str, None] = {}
    num_values = 0
    for value in values:
        for single in value if isinstance(value, list | tuple) else (value,):
            key = label_key(single)
            if key is not None:
                keys[key] = None
            elif not is_missing(single):
                raise _not_classes(f"holds {single!r}", column, origin)
            num_values += 1
    if len(keys) > MANY_LABELS or (num_values >= 100 and len(keys) > num_values / 2):
        raise _not_classes(f"holds {len(keys)} different values in {num_values} rows", column, origin)
    if len(keys) < 2:
        raise DataError(
            f"{origin}: column {column!r} holds {len(keys)} label ({listed(list(keys))}) in {num_values} rows: "
            "there is nothing to tell apart",
            "give rows of two labels or more (a slice of sorted data may hold one only), or name another data.label",
        )
    in_order = sorted(keys, key=int) if all(map(_is_whole_number, keys)) else sorted(keys)
    return LabelSet(in_order)


def _not_classes(what: str, column: str, origin: str) -> DataError:
    return DataError(
        f"{origin}: column {column!r} {what}: these are no classes",
        "set task: regress to learn numbers, or name another column in data.label",
    )


def holds_fractions(values: Iterable[Any]) -> bool:
    """Whether a column holds numbers to be learnt as numbers: any fraction, or many whole ones that leave gaps."""
    whole_numbers: set[float] = set()
    for value in values:
        if is_missing(value):
            continue
        number = as_number(value)
        if number is None or isinstance(value, bool):
            return False
        if not number.is_integer():
            return True
        whole_numbers.add(number)
    return len(whole_numbers) > _WHOLE_NUMBER_LABELS and whole_numbers != set(range(len(whole_numbers)))


def as_number(value: Any) -> float | None:
    """A cell as a finite number, or None."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None  # a comparison with nan is false


def as_flag(value: Any) -> bool | None:
    """A cell that says yes or no, or None where it does not."""
    key = label_key(value)
    key = key.casefold() if key is not None else None
    return True if key in _YES else False if key in _NO else None


def is_multi_hot(values: Sequence[Any]) -> bool:
    """Whether a list column holds one 0 or 1 for each label rather than the labels themselves.

    All lists have one length of at least two and hold nothing but 0 and 1. Read as labels, every row would hold both.
    """
    lists = [value for value in values if isinstance(value, list | tuple)]
    if len({len(value) for value in lists}) != 1 or len(lists[0]) < 2:
        return False
    return all(not isinstance(single, str) and single in (0, 1) for value in lists for single in value)


def _is_whole_number(text: str) -> bool:
    return len(text) <= _MOST_DIGITS and text.removeprefix("-").isdecimal()
