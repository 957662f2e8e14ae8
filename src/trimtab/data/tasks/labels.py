"""The set of labels: their names and indices.

A label is identified by its text: 1 in one file and "1" in another are the same label.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trimtab.data.tasks.columns import is_missing, list_values
from trimtab.errors import DataError

# A column with more distinct values contains numbers or free text rather than classes.
_MAX_LABELS = 1000
_MIN_ROWS = 10  # as many labels as rows are texts; in fewer rows, that may be chance
_MAX_WHOLE_NUMBER_LABELS = 100
_MAX_RATIO = 10  # rows of the most frequent label for one of the rarest
_MISSING = {"na", "n/a", "#n/a", "<na>", "nan", "null"}
_MAX_DIGITS = 1000  # int() raises above 4,300
_YES = {"1", "true", "yes"}
_NO = {"0", "false", "no"}


def label_key(value: Any) -> str | None:
    """Return the text that identifies a label, or None if a value cannot be a label."""
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
    """The labels of a classification task, in the order of their indices.

    Args:
        names: Their names.
        integers_are_indices: Whether an integer in the data is the index of a name, as in ClassLabel columns of
            `datasets`, rather than a name.
        owner: What has these labels, for messages: the training rows, or a model.
    """

    def __init__(
        self, names: Sequence[str], *, integers_are_indices: bool = False, owner: str = "the training rows"
    ) -> None:
        self.names = list(names)
        self.owner = owner
        self._numbers = {name: number for number, name in enumerate(self.names)}
        self._indices = {str(number): number for number in range(len(self.names))}
        self._integers_are_indices = integers_are_indices

    def __len__(self) -> int:
        return len(self.names)

    def number(self, value: Any) -> int | None:
        """Return the index of a label, or None if it is unknown."""
        key = label_key(value)
        if key is None:
            return None
        if self._integers_are_indices and not isinstance(value, str):
            return self._indices.get(key)
        return self._numbers.get(key, self._indices.get(key) if self._accepts_indices else None)

    @property
    def _accepts_indices(self) -> bool:
        """Names that are numbers themselves (1 to 5 stars) must not be read as indices too."""
        return self._integers_are_indices or not all(_is_whole_number(name) for name in self.names)


def collect_labels(values: Iterable[Any], column: str, origin: str) -> LabelSet:
    """Collect the labels of a column; a list counts each of its labels.

    Raises:
        DataError: If the values are not classes: too many, fewer than two, or fractions.
    """
    keys: dict[str, None] = {}
    num_values = 0
    for value in values:
        for single in value if isinstance(value, list | tuple) else (value,):
            key = label_key(single)
            if key is not None:
                keys[key] = None
            elif not is_missing(single):
                raise _not_classes(f"contains {single!r}", column, origin)
            num_values += 1
    are_texts = len(keys) == num_values >= _MIN_ROWS or (num_values >= 100 and len(keys) > num_values / 2)
    if len(keys) > _MAX_LABELS or are_texts:
        raise _not_classes(f"has {len(keys)} distinct values in {num_values} rows", column, origin)
    if len(keys) < 2:
        found = f"1 label ({list_values(list(keys))})" if keys else "no label"
        raise DataError(
            f"{origin}: column {column!r} has {found} in {num_values} rows: classification needs at least two",
            "add rows with other labels (a slice of sorted data may have one), or set data.label to another column",
        )
    in_order = sorted(keys, key=int) if all(map(_is_whole_number, keys)) else sorted(keys)
    return LabelSet(in_order)


def _not_classes(what: str, column: str, origin: str) -> DataError:
    return DataError(
        f"{origin}: column {column!r} {what}: these are not classes",
        "set task: regress to predict numbers, or set data.label to another column",
    )


def suspicious_labels(names: Sequence[str], origin: str) -> list[str]:
    """Return lines about labels that are probably missing values, or spellings of another label."""
    missing = [name for name in names if name.casefold() in _MISSING]
    lines = []
    if missing:
        lines.append(
            f"{origin}: {list_values(missing)} {'is' if len(missing) == 1 else 'are'} trained like any other label; "
            "if it means that the label is missing, remove these rows"
        )
    by_spelling: dict[str, list[str]] = {}
    for name in names:
        by_spelling.setdefault(" ".join(name.casefold().split()), []).append(name)
    same = [spellings for spellings in by_spelling.values() if len(spellings) > 1]
    lines += [
        f"{origin}: {list_values(each)} are different labels; write them alike if they mean the same" for each in same
    ]
    return lines


def imbalance(names: Sequence[str], numbers: Sequence[int], origin: str) -> list[str]:
    """Return a line if a label is much more frequent than another one.

    Args:
        names: The labels.
        numbers: The index of each row's label.
        origin: The source of the rows.
    """
    counts = Counter(numbers)
    most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
    if counts[most] < _MAX_RATIO * counts[least]:
        return []
    return [
        f"{origin}: labels are imbalanced: {counts[most]:,} training rows have {names[most]!r} and {counts[least]:,} "
        f"{names[least]!r} ({counts[most] / counts[least]:.0f}:1; see train.class_weights)"
    ]


def class_weights(wanted: str | Mapping[str, float], names: Sequence[str], numbers: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each label in the loss.

    Args:
        wanted: "balanced", or the weights of some labels; others have weight 1.
        names: The labels.
        numbers: The index of each training row's label.

    Raises:
        DataError: If a weight is for an unknown label.
    """
    if isinstance(wanted, str):
        counts = Counter(numbers)  # of labels that occur: the list of a dataset may contain others
        balanced = {number: len(numbers) / (len(counts) * count) for number, count in counts.items()}
        return tuple(balanced.get(number, 1.0) for number in range(len(names)))
    unknown = [name for name in wanted if name not in names]
    if unknown:
        raise DataError(
            f"train.class_weights has a weight for {unknown[0]!r}, which is not one of the labels {list_values(names)}",
            "use names of labels",
        )
    return tuple(wanted.get(name, 1.0) for name in names)


def are_regression_targets(values: Iterable[Any]) -> bool:
    """Whether a column contains numbers to regress: a fraction, or many whole numbers with gaps."""
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
    return len(whole_numbers) > _MAX_WHOLE_NUMBER_LABELS and whole_numbers != set(range(len(whole_numbers)))


def as_number(value: Any) -> float | None:
    """Convert a cell to a finite number, or return None."""
    if not isinstance(value, str | int | float):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < float("inf") else None  # NaN compares false


def as_flag(value: Any) -> bool | None:
    """Convert a cell such as 0, "yes" or True to a boolean, or return None."""
    key = label_key(value)
    key = key.casefold() if key is not None else None
    return True if key in _YES else False if key in _NO else None


def is_multi_hot(values: Sequence[Any]) -> bool:
    """Whether a column of lists contains one 0 or 1 per label rather than the labels.

    All lists then have the same length, at least two, and contain only 0 and 1. Read as label names, every row would
    have both labels.
    """
    lists = [value for value in values if isinstance(value, list | tuple)]
    if len({len(value) for value in lists}) != 1 or len(lists[0]) < 2:
        return False
    return all(not isinstance(single, str) and single in (0, 1) for value in lists for single in value)


def _is_whole_number(text: str) -> bool:
    return len(text) <= _MAX_DIGITS and text.removeprefix("-").isdecimal()
