"""Rows as columns of plain Python values, each row with the place it came from.

Every source of data becomes `Rows`; tasks read them, and name the place of a row that they cannot use.
"""

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import DataError
from trimtab.log import say


@dataclass(frozen=True)
class Places:
    """Where rows came from, in 12 bytes a row.

    Args:
        names: What stands before a number, for example "reviews.csv, line".
        which: For each row the index of its name.
        numbers: For each row its number within that name, counted from 1.
    """

    names: tuple[str, ...]
    which: "array[int]"
    numbers: "array[int]"

    @classmethod
    def of(cls, name: str, numbers: Iterable[int]) -> "Places":
        """The places of rows that share one name."""
        counted = array("q", numbers)
        return cls((name,), array("i", bytes(4 * len(counted))), counted)

    def select(self, indices: Sequence[int]) -> "Places":
        """The places of some rows, in the order of `indices`."""
        which, numbers = self.which, self.numbers
        return Places(self.names, array("i", (which[i] for i in indices)), array("q", (numbers[i] for i in indices)))

    def __getitem__(self, index: int) -> str:
        return f"{self.names[self.which[index]]} {self.numbers[index]}"


@dataclass(frozen=True)
class Rows:
    """Rows of data as columns of equal length.

    Args:
        columns: Column name to its values.
        origin: Where they came from, in words for the user.
        label_names: For columns that hold class indices with known names: the names, in the order of the indices.
        places: Where each row stands; by default its number in `origin`.
    """

    columns: dict[str, list[Any]]
    origin: str
    label_names: dict[str, list[str]] = field(default_factory=dict)
    places: Places | None = None

    def __post_init__(self) -> None:
        sizes = {name: len(values) for name, values in self.columns.items()}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items())
            raise DataError(f"{self.origin}: columns of different lengths ({found})", "give every column all rows")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    @property
    def names(self) -> list[str]:
        """The names of the columns, in their order."""
        return list(self.columns)

    def row(self, index: int) -> dict[str, Any]:
        """One row as column name to value."""
        return {name: values[index] for name, values in self.columns.items()}

    def place(self, index: int) -> str:
        """Where a row stands, for example "reviews.csv, line 17"."""
        index = range(len(self))[index]
        return f"{self.origin}, row {index + 1}" if self.places is None else self.places[index]

    def select(self, indices: Sequence[int]) -> "Rows":
        """Some rows, in the order of `indices`; each keeps its place."""
        places = self.places or Places.of(f"{self.origin}, row", range(1, len(self) + 1))
        columns = {name: [values[i] for i in indices] for name, values in self.columns.items()}
        return Rows(columns, self.origin, self.label_names, places.select(indices))


def joined(parts: Sequence[Rows], origin: str) -> Rows:
    """Rows one after the other; all parts must have the same columns.

    Raises:
        DataError: If a part has other columns than the first.
    """
    parts = [part for part in parts if part.columns] or list(parts[:1])  # an empty file has not even a header
    first = parts[0]
    if len(parts) == 1:
        return Rows(first.columns, origin, first.label_names, first.places)
    columns: dict[str, list[Any]] = {name: [] for name in first.columns}
    names: list[str] = []
    which, numbers = array("i"), array("q")
    for part in parts:
        if set(part.columns) != set(columns):
            raise DataError(
                f"{part.origin} has the columns {', '.join(part.names)}, but {first.origin} has {', '.join(columns)}",
                "name files of one kind, for example with a pattern such as data/reviews-*.csv",
            )
        places = part.places or Places.of(f"{part.origin}, row", range(1, len(part) + 1))
        which.extend(index + len(names) for index in places.which)
        numbers.extend(places.numbers)
        names.extend(places.names)
        for name, values in columns.items():
            values.extend(part.columns[name])
    return Rows(columns, origin, first.label_names, Places(tuple(names), which, numbers))


def split_off(rows: Rows, share: float, seed: int, *, label: str | None = None) -> tuple[Rows, Rows]:
    """Split rows in two, as a pure function of the seed; both parts keep the order of the rows.

    Args:
        rows: At least two rows.
        share: The share of the second part, between 0 and 1; each part gets at least one row.
        seed: Chooses the rows.
        label: A column whose values are spread over both parts by their shares. A value is then never in the second
            part alone, so that a model is not asked for a label that it never saw.

    Returns:
        The rows that stay and the rows that were split off.
    """
    num_rows = len(rows)
    if not 0 < share < 1:
        raise DataError(f"a share of {share} cannot be split off", "set data.eval_share between 0 and 1")
    if num_rows < 2:
        raise DataError(f"{rows.origin} has {num_rows} row(s): no eval set can be split off", "name one in data.eval")
    if label is not None and label not in rows.columns:
        raise DataError(f"{rows.origin} has no column {label!r}", f"the columns are {', '.join(rows.names)}")
    order = list(range(num_rows))
    random.Random(f"trimtab split {seed}").shuffle(order)
    wanted = min(max(round(num_rows * share), 1), num_rows - 1)
    chosen = order[:wanted] if label is None else _stratified(order, rows.columns[label], wanted)
    if len(chosen) < wanted:
        say(
            f"{rows.origin}: {len(chosen)} rows split off for evaluation instead of {wanted}, "
            f"because many values of {label!r} stand in one row only"
        )
    taken = set(chosen)
    return rows.select([i for i in range(num_rows) if i not in taken]), rows.select(sorted(taken))


def _stratified(order: list[int], values: list[Any], wanted: int) -> list[int]:
    """Up to `wanted` rows of the shuffled `order`: of each value its share, by largest remainder, but never all."""
    groups: dict[str | int, list[int]] = {}
    for index in order:
        groups.setdefault(_as_key(values[index]), []).append(index)
    quotas = {key: len(group) * wanted / len(order) for key, group in groups.items()}
    counts = {key: min(int(quotas[key]), len(group) - 1) for key, group in groups.items()}
    # Groups stand in the order of their first row in the shuffle, so that ties fall by the seed.
    while missing := wanted - sum(counts.values()):
        open_keys = [key for key, group in groups.items() if counts[key] < len(group) - 1]
        if not open_keys:
            break
        for key in sorted(open_keys, key=lambda key: counts[key] - quotas[key])[:missing]:
            counts[key] += 1
    chosen = [index for key, group in groups.items() for index in group[: counts[key]]]
    return chosen or order[:wanted]


def _as_key(value: Any) -> str | int:
    """A value that can be compared: several labels of a row are one value, and so is nan."""
    return value if isinstance(value, str | int) else repr(value)
