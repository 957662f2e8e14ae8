"""Column names in common use, by role, and the search for them among the columns of a data file."""

import math
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from trimtab.data.rows import Rows
from trimtab.errors import DataError

# `find` accepts either of the first two names of a table; of the other names, exactly one must be among the columns.
TEXT_NAMES = (
    *("text", "sentence", "review", "content", "document", "comment", "tweet", "utterance", "question", "query"),
    *("message", "body", "snippet", "description", "headline", "title", "article", "post", "prompt", "input"),
)
LABEL_NAMES = (
    *("label", "labels", "target", "sentiment", "class", "category", "intent", "topic", "emotion", "score"),
    *("rating", "stars", "polarity", "grade", "gold", "gold_label", "is_duplicate", "toxic", "similarity_score", "y"),
)
MESSAGE_NAMES = ("messages", "conversations", "conversation", "chat", "dialog", "dialogue")
PAIR_NAMES = (
    *(("sentence1", "sentence2"), ("sentence_1", "sentence_2"), ("text1", "text2"), ("text_a", "text_b")),
    *(("premise", "hypothesis"), ("question1", "question2"), ("question", "sentence"), ("question", "passage")),
    *(("question", "context"), ("question", "answer"), ("query", "document"), ("query", "passage")),
)
PROMPT_NAMES = ("instruction", "prompt", "question", "query", "input")
ANSWER_NAMES = ("output", "response", "completion", "answer")
SEQ2SEQ_NAMES = (
    *(("source", "target"), ("src", "tgt"), ("document", "summary"), ("article", "highlights"), ("article", "summary")),
    *(
        ("dialogue", "summary"),
        ("text", "summary"),
        ("text", "target"),
        ("input", "target"),
        ("source_text", "target_text"),
    ),
)
_ID_NAMES = {"id", "idx", "index", "row", "uid", "uuid", "guid", "url", "link", "timestamp", "date", "source", "meta"}


def is_missing(value: Any) -> bool:
    """Whether a cell is empty: None, NaN or white space."""
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def require(rows: Rows, name: str, key: str) -> str:
    """Return the column name if the column exists.

    Raises:
        DataError: If it does not, with the existing columns and the recipe key to set.
    """
    if name in rows.columns:
        return name
    near = get_close_matches(name, rows.names, n=1) or [n for n in rows.names if n.casefold() == name.casefold()]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise DataError(
        f"{rows.origin} has no column {name!r}{hint}; the columns are {list_values(rows.names)}",
        f"set {key} to one of them",
    )


def find(rows: Rows, table: Sequence[str], *, besides: Sequence[str] = ()) -> str | None:
    """Return the one column that a table of names matches, or None if none or several match."""
    present = {name.strip().casefold(): name for name in rows.names if name not in besides}
    for name in table[:2]:
        if name in present:
            return present[name]
    found = [present[name] for name in table[2:] if name in present]
    return found[0] if len(found) == 1 else None


def find_pair(rows: Rows, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Return the first pair of names that are both columns."""
    present = {name.strip().casefold(): name for name in rows.names}
    for first, second in pairs:
        if first in present and second in present:
            return present[first], present[second]
    return None


def find_text(rows: Rows, besides: Sequence[str] = ()) -> str | None:
    """Return the column of the text: by its name, or because it is the only column of strings."""
    named = find(rows, TEXT_NAMES, besides=besides)
    if named is not None:
        return named
    others = [name for name in rows.names if name not in besides and not is_identifier(name)]
    of_strings = [name for name in others if isinstance(first_value(rows, name), str)]
    return of_strings[0] if len(of_strings) == 1 else None


def is_identifier(name: str) -> bool:
    """Whether the name of a column says that it identifies rows or their source."""
    lowered = name.strip().casefold()
    return lowered in _ID_NAMES or lowered.endswith("_id")


def first_value(rows: Rows, name: str) -> Any:
    """Return the first value of a column that is not missing."""
    return next((value for value in rows.columns[name] if not is_missing(value)), None)


def strings_in(value: Any) -> Iterator[str]:
    """Yield every string in a value, also those in the messages of a chat."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def column_list(columns: str | Sequence[str]) -> list[str]:
    """Return the columns of a role, which may be one name or several."""
    return [columns] if isinstance(columns, str) else list(columns)


def list_values(values: Sequence[Any], limit: int = 8) -> str:
    """Format values for a message, at most `limit` of them."""
    shown = ", ".join(repr(value) for value in values[:limit])
    return f"{shown} and {len(values) - limit} more" if len(values) > limit else shown or "none"
