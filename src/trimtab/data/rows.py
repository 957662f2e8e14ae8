"""Rows of data as columns of plain Python values, with the location of every row in its source.

Every source of data becomes `Rows`. Tasks read them and name the location of a row that they cannot use.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import DataError
from trimtab.log import say


@dataclass(frozen=True)
class RowLocations:
    """Locations of rows, in 12 bytes per row.

    Args:
        names: What precedes a number, for example "reviews.csv, line".
        which: For each row the index of its name.
        numbers: For each row its number within that name, starting at 1.
    """

    names: tuple[str, ...]
    which: "array[int]"
    numbers: "array[int]"

    @classmethod
    def of(cls, name: str, numbers: Iterable[int]) -> "RowLocations":
        """Create the locations of rows that share one name."""
        counted = array("q", numbers)
        return cls((name,), array("i", bytes(4 * len(counted))), counted)

    def select(self, indices: Sequence[int]) -> "RowLocations":
        """Return the locations of some rows, in the order of `indices`."""
        which, numbers = self.which, self.numbers
        return RowLocations(
            self.names, array("i", (which[i] for i in indices)), array("q", (numbers[i] for i in indices))
        )

    def __getitem__(self, index: int) -> str:
        return f"{self.names[self.which[index]]} {self.numbers[index]}"


@dataclass(frozen=True)
class Rows:
    """Rows of data as columns of equal length.

    Args:
        columns: Column name to its values.
        origin: The source, for messages.
        label_names: For columns of class indices: the names, in the order of the indices.
        locations: Where each row is; by default its number in `origin`.
    """

    columns: dict[str, list[Any]]
    origin: str
    label_names: dict[str, list[str]] = field(default_factory=dict)
    locations: RowLocations | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.columns.items()}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise DataError(
                f"{self.origin}: columns of different lengths ({found})", "make all columns the same length"
            )

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def names(self) -> list[str]:
        """The names of the columns, in order."""
        return list(self.columns)

    @property
    def all_locations(self) -> RowLocations:
        """The locations of all rows, defaults filled in."""
        return self.locations or RowLocations.of(f"{self.origin}, row", range(1, len(self) + 1))

    def row(self, index: int) -> dict[str, Any]:
        """Return one row as column name to value."""
        return {name: values[index] for name, values in self.columns.items()}

    def location(self, index: int) -> str:
        """Return where a row is, for example "reviews.csv, line 17"."""
        index = range(len(self))[index]
        return f"{self.origin}, row {index + 1}" if self.locations is None else self.locations[index]

    def select(self, indices: Sequence[int]) -> "Rows":
        """Return some rows, in the order of `indices`; each keeps its location."""
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return Rows(columns, self.origin, self.label_names, self.all_locations.select(indices))


def concatenate(parts: Sequence[Rows], origin: str) -> Rows:
    """Concatenate rows of the same columns.

    Raises:
        DataError: If the columns of a part differ from those of the first.
    """
    parts = [part for part in parts if part.columns] or list(parts[:1])  # an empty file has no columns
    first = parts[0]
    if len(parts) == 1:
        return Rows(first.columns, origin, first.label_names, first.locations)
    columns: dict[str, list[Any]] = {name: [] for name in first.columns}
    names: list[str] = []
    which, numbers = array("i"), array("q")
    for part in parts:
        if set(part.columns) != set(columns):
            raise DataError(
                f"{part.origin} has the columns {', '.join(part.names)}, but {first.origin} has {', '.join(columns)}",
                "choose files with the same columns, for example with a pattern such as data/reviews-*.csv",
            )
        locations = part.all_locations
        which.extend(index + len(names) for index in locations.which)
        numbers.extend(locations.numbers)
        names.extend(locations.names)
        for name, values in columns.items():
            values.extend(part.columns[name])
    return Rows(columns, origin, first.label_names, RowLocations(tuple(names), which, numbers))


def hold_out_rows(rows: Rows, share: float, seed: int, *, label: str | None = None) -> tuple[Rows, Rows]:
    """Split rows into training and held-out rows, as a pure function of the seed; both keep the order of the rows.

    Args:
        rows: At least two rows.
        share: The fraction to hold out, between 0 and 1; each part gets at least one row.
        seed: Decides which rows are held out.
        label: A column to stratify by. Then no value occurs only in the held-out rows, so the model is not evaluated on
            a label that it was not trained on.

    Returns:
        The training rows and the held-out rows.
    """
    num_rows = len(rows)
    if not 0 < share < 1:
        raise DataError(f"data.eval_share is {share}", "set data.eval_share between 0 and 1")
    if num_rows < 2:
        raise DataError(
            f"{rows.origin}: {num_rows} row{'' if num_rows == 1 else 's'}, too few to hold some out",
            "set data.eval to another file, or data.eval_share: 0 to train without evaluation",
        )
    if label is not None and label not in rows.columns:
        raise DataError(f"{rows.origin} has no column {label!r}", f"the columns are {', '.join(rows.names)}")
    order = list(range(num_rows))
    random.Random(f"trimtab split {seed}").shuffle(order)
    wanted = min(max(round(num_rows * share), 1), num_rows - 1)
    chosen = order[:wanted] if label is None else _stratify(order, rows.columns[label], wanted)
    if len(chosen) < wanted:
        say(f"{rows.origin}: {len(chosen)} rows held out instead of {wanted}: many values of {label!r} occur only once")
    taken = set(chosen)
    return rows.select([i for i in range(num_rows) if i not in taken]), rows.select(sorted(taken))


def _stratify(order: list[int], values: list[Any], wanted: int) -> list[int]:
    """Choose up to `wanted` rows of the shuffled `order`: an equal fraction of each value, but never all its rows."""
    groups: dict[str | int, list[int]] = {}
    for index in order:
        groups.setdefault(_as_key(values[index]), []).append(index)
    quotas = {key: len(group) * wanted / len(order) for key, group in groups.items()}
    counts = {key: min(int(quotas[key]), len(group) - 1) for key, group in groups.items()}
    # Groups are in the order of their first row in the shuffle, so the seed decides ties.
    while missing := wanted - sum(counts.values()):
        open_keys = [key for key, group in groups.items() if counts[key] < len(group) - 1]
        if not open_keys:
            break
        for key in sorted(open_keys, key=lambda key: counts[key] - quotas[key])[:missing]:
            counts[key] += 1
    chosen = [index for key, group in groups.items() for index in group[: counts[key]]]
    return chosen or order[:wanted]


def _as_key(value: Any) -> str | int:
    """Return a hashable key of a value; a list of labels is one value, and so is NaN."""
    return value if isinstance(value, str | int) else repr(value)
