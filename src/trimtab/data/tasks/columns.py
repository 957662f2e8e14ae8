"""Which column holds what: tables of the names that people use, and errors that list what is there."""

import math
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from trimtab.data.rows import Rows
from trimtab.errors import DataError

# The first two of a table are taken wherever they stand; of the others exactly one must be there.
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
    """Whether a cell holds nothing: None, nan, or only white space."""
    if value is None:
        return True
    if isinstance(value, str):
        return not value.strip()
    return isinstance(value, float) and math.isnan(value)


def require(rows: Rows, name: str, key: str) -> str:
    """The column named, if it is there.

    Raises:
        DataError: If it is not, with the columns that are.
    """
    if name in rows.columns:
        return name
    near = get_close_matches(name, rows.names, n=1) or [n for n in rows.names if n.casefold() == name.casefold()]
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise DataError(
        f"{rows.origin} has no column {name!r}{hint}; it has {listed(rows.names)}", f"set {key} to one of them"
    )


def find(rows: Rows, table: Sequence[str], *, besides: Sequence[str] = ()) -> str | None:
    """The one column that a table of names points to, or None where there is none or it is not clear which."""
    present = {name.strip().casefold(): name for name in rows.names if name not in besides}
    for name in table[:2]:
        if name in present:
            return present[name]
    found = [present[name] for name in table[2:] if name in present]
    return found[0] if len(found) == 1 else None


def find_pair(rows: Rows, pairs: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """The first pair of names that stand in the columns together."""
    present = {name.strip().casefold(): name for name in rows.names}
    for first, second in pairs:
        if first in present and second in present:
            return present[first], present[second]
    return None


def find_text(rows: Rows, besides: Sequence[str] = ()) -> str | None:
    """The column that holds the text: by its name, or because it alone holds words."""
    named = find(rows, TEXT_NAMES, besides=besides)
    if named is not None:
        return named
    others = [name for name in rows.names if name not in besides and not is_identifier(name)]
    worded = [name for name in others if isinstance(first_value(rows, name), str)]
    return worded[0] if len(worded) == 1 else None


def is_identifier(name: str) -> bool:
    """Whether a column's name says that it only tells rows apart, or where they are from."""
    lowered = name.strip().casefold()
    return lowered in _ID_NAMES or lowered.endswith("_id")


def first_value(rows: Rows, name: str) -> Any:
    """The first value of a column that is not missing."""
    return next((value for value in rows.columns[name] if not is_missing(value)), None)


def listed(values: Sequence[Any], most: int = 8) -> str:
    """Values for a message: all of them if they are few."""
    shown = ", ".join(repr(value) for value in values[:most])
    return f"{shown} and {len(values) - most} more" if len(values) > most else shown or "none"
