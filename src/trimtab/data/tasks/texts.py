"""The text of a row, from one column or from two (a sentence pair), checked and tokenized."""

from collections.abc import Sequence
from typing import Any

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Problem
from trimtab.data.tasks.columns import PAIR_NAMES, find_pair, find_text, is_missing, list_values, require
from trimtab.data.tasks.tokenization import tokenize
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError

# A tokenizer takes about 160 bytes per character and reads the whole text even if it is truncated. The text cannot be
# cut beforehand: whether its tokens would change depends on the tokenizer.
MAX_CHARACTERS = 10_000_000


class TextColumns:
    """One or two columns of text.

    Args:
        names: The columns, in the order in which the tokenizer gets them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    @property
    def as_role(self) -> str | list[str]:
        """The value of data.text in a recipe: a name, or a list of two."""
        return self.names[0] if len(self.names) == 1 else self.names

    def problem(self, rows: Rows, index: int) -> Problem:
        """Return what is wrong with the text of a row, or None."""
        for name in self.names:
            problem = text_problem(rows.columns[require(rows, name, "data.text")][index], name)
            if problem is not None:
                return problem
        return None

    def encode(self, rows: Rows, tokenizer: Any, max_length: int, labels: Sequence[Any]) -> TokenDataset:
        """Tokenize the texts of checked rows to a dataset with these labels."""
        tokenized = tokenize(tokenizer, *(column_texts(rows, name) for name in self.names), max_length=max_length)
        columns: dict[str, Sequence[Any]] = {"input_ids": tokenized.input_ids, "labels": labels}
        if tokenized.token_type_ids is not None:
            columns["token_type_ids"] = tokenized.token_type_ids
        examples = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return TokenDataset.from_examples(examples, num_truncated=tokenized.num_truncated)


def text_problem(value: Any, column: str) -> Problem:
    """Return what is wrong with a cell of text, or None. Numbers are valid texts."""
    if is_missing(value):
        return f"column {column!r} is empty", "write a text or remove the row"
    if not isinstance(value, str | int | float):
        return f"column {column!r} contains a {type(value).__name__}, expected text", "write a text"
    if isinstance(value, str) and len(value) > MAX_CHARACTERS:
        return too_long(column, len(value))
    return None


def too_long(column: str, num_characters: int) -> tuple[str, str]:
    """Return problem and fix of a text that would take gigabytes to tokenize."""
    problem = f"column {column!r} contains {num_characters:,} characters, the maximum is {MAX_CHARACTERS:,}"
    return problem, "split it into several rows or shorten it"


def column_texts(rows: Rows, name: str) -> list[str]:
    """Return the values of a checked column as strings."""
    return [value if isinstance(value, str) else str(value) for value in rows.columns[name]]


def choose_text(
    rows: Rows, named: str | Sequence[str] | None, notes: list[str], *, besides: Sequence[str] = (), pairs: bool = True
) -> TextColumns:
    """Return the text columns that the recipe names, or guess them from the column names.

    Args:
        rows: The training rows.
        named: Value of data.text.
        notes: A log line about a guess is appended to it.
        besides: Columns with another role.
        pairs: Whether two columns may form sentence pairs.

    Raises:
        DataError: If a named column does not exist, or the guess is ambiguous.
    """
    if named is not None:
        names = [named] if isinstance(named, str) else list(named)
        if len(names) not in ((1, 2) if pairs else (1,)):
            allowed = "one column, or to a list of two for sentence pairs" if pairs else "one column"
            raise DataError(
                f"data.text names {len(names)} columns: {list_values(names)}", f"set data.text to {allowed}"
            )
        return TextColumns([require(rows, name, "data.text") for name in names])
    pair = find_pair(rows, PAIR_NAMES) if pairs else None
    if pair is not None and not set(pair) & set(besides):
        notes.append(f"sentence pairs: columns {pair[0]!r} and {pair[1]!r} (guessed; set data.text to change it)")
        return TextColumns(pair)
    name = find_text(rows, besides)
    if name is None:
        raise DataError(
            f"{rows.origin}: cannot tell which column is the text; the columns are {list_values(rows.names)}",
            "set data.text to its name" + (" (or to a list of two for sentence pairs)" if pairs else ""),
        )
    notes.append(f"text: column {name!r} (guessed; set data.text to change it)")
    return TextColumns([name])
