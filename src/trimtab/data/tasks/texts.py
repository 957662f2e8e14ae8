"""The text of a row, from one column or from two (a sentence pair), checked and tokenized."""

from collections.abc import Sequence
from typing import Any

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Problem
from trimtab.data.tasks.columns import PAIR_NAMES, find_pair, find_text, is_missing, listed, require
from trimtab.data.tasks.tokenizing import Tokenized, tokenize
from trimtab.errors import DataError

# A tokenizer needs about 160 bytes for each character of a text, and looks at all of it however little is kept: where a
# text could be cut beforehand without changing its tokens depends on the tokenizer, and is not known.
MOST_CHARACTERS = 10_000_000


class TextColumns:
    """One or two columns that hold the text.

    Args:
        names: The columns, in the order in which the tokenizer takes them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    @property
    def as_role(self) -> str | list[str]:
        """The columns as a recipe writes them: a name, or a list of two."""
        return self.names[0] if len(self.names) == 1 else self.names

    def problem(self, rows: Rows, index: int) -> Problem:
        """What is wrong with the text of a row."""
        for name in self.names:
            problem = text_problem(rows.columns[require(rows, name, "data.text")][index], name)
            if problem is not None:
                return problem
        return None

    def tokenize(self, rows: Rows, tokenizer: Any, max_length: int | None) -> Tokenized:
        """The tokens of all rows."""
        columns = [column_texts(rows, name) for name in self.names]
        return tokenize(tokenizer, columns[0], columns[1] if len(columns) > 1 else None, max_length=max_length)


def text_problem(value: Any, column: str) -> Problem:
    """What is wrong with a cell that should hold text. Numbers are taken as they are written."""
    if is_missing(value):
        return f"column {column!r} is empty", "write a text there or remove the row"
    if not isinstance(value, str | int | float):
        return f"column {column!r} holds a {type(value).__name__} where text is expected", "write a text there"
    if isinstance(value, str) and len(value) > MOST_CHARACTERS:
        return too_long(column, len(value))
    return None


def too_long(column: str, num_characters: int) -> tuple[str, str]:
    """What is wrong with a text that would take gigabytes to tokenize."""
    problem = f"column {column!r} holds {num_characters:,} characters, more than {MOST_CHARACTERS:,}"
    return problem, "split it into several rows, or keep the part that is to be learnt"


def column_texts(rows: Rows, name: str) -> list[str]:
    """The values of a checked column as texts."""
    return [value if isinstance(value, str) else str(value) for value in rows.columns[name]]


def choose_text(
    rows: Rows, asked: str | Sequence[str] | None, said: list[str], *, besides: Sequence[str] = (), pairs: bool = True
) -> TextColumns:
    """The text columns that the user named, or those that are clear from the names.

    Args:
        rows: The training rows.
        asked: What the recipe says.
        said: Takes a line about a guess.
        besides: Columns that have another role.
        pairs: Whether two columns may be a sentence pair.

    Raises:
        DataError: If a named column is not there, or it is not clear which one is meant.
    """
    if asked is not None:
        names = [asked] if isinstance(asked, str) else list(asked)
        if len(names) not in ((1, 2) if pairs else (1,)):
            allowed = "one column, or two for pairs" if pairs else "one column"
            raise DataError(f"data.text names {len(names)} columns: {listed(names)}", f"name {allowed}")
        return TextColumns([require(rows, name, "data.text") for name in names])
    pair = find_pair(rows, PAIR_NAMES) if pairs else None
    if pair is not None and not set(pair) & set(besides):
        said.append(f"sentence pairs from the columns {pair[0]!r} and {pair[1]!r} (guessed; data.text says otherwise)")
        return TextColumns(pair)
    name = find_text(rows, besides)
    if name is None:
        raise DataError(
            f"{rows.origin}: it is not clear which column holds the text; there are {listed(rows.names)}",
            "set data.text to its name" + (" (or to a list of two for sentence pairs)" if pairs else ""),
        )
    said.append(f"text from the column {name!r} (guessed; data.text says otherwise)")
    return TextColumns([name])
