"""Convert the rows of a file to model inputs: a text, a pair of texts, or the messages of a chat."""

from collections.abc import Sequence
from typing import Any

from trimtab.data.rows import Rows
from trimtab.data.tasks.columns import (
    MESSAGE_NAMES,
    PAIR_NAMES,
    PROMPT_NAMES,
    TEXT_NAMES,
    column_list,
    find,
    find_pair,
    is_missing,
)
from trimtab.data.tasks.messages import BadMessages, as_messages, as_tools, read_prompt
from trimtab.data.tasks.texts import text_problem
from trimtab.errors import DataError
from trimtab.inference.load import LoadedModel
from trimtab.log import say


def read_inputs(loaded: LoadedModel, rows: Rows, columns: str | Sequence[str] | None = None) -> list[Any]:
    """Return the model input of each row; None for a row without a text.

    Args:
        loaded: The model.
        rows: The rows.
        columns: The column of the texts, or several: two texts of a pair, or the parts of a prompt. By default those of
            the training data, or guessed from their names.

    Raises:
        DataError: If a column is missing or ambiguous, or contains something other than text.
    """
    names = _choose_columns(loaded, rows, columns)
    missing = [name for name in names if name not in rows.columns]
    if missing or not names:
        problem = f"has no column {missing[0]!r}" if missing else "has no column that is recognized as the text"
        raise DataError(
            f"{rows.origin} {problem}; the columns are {', '.join(rows.names)}",
            "set the text column: --column NAME (text=NAME in Python)",
        )
    read = _read_messages if loaded.task_name == "chat" else _read_text
    return [read(loaded, rows, index, names) for index in range(len(rows))]


def _choose_columns(loaded: LoadedModel, rows: Rows, wanted: str | Sequence[str] | None) -> list[str]:
    roles = ("messages", "prompt") if loaded.task_name == "chat" else ("text",)
    known = loaded.facts.get("recipe", {}).get("data", {}) | loaded.facts.get("columns", {})
    trained = next((known[role] for role in roles if known.get(role)), None)
    if loaded.task_name == "chat" and not set(column_list(trained or ())) & set(rows.names):
        trained = None  # conversations in another form, which is recognized as in training
    given = wanted or trained
    if given is not None:
        return [given] if isinstance(given, str) else list(given)
    if len(rows.names) == 1:
        return rows.names
    names = _guess_prompt(rows) if loaded.task_name == "chat" else []
    if not names and loaded.task_name in ("classify", "regress"):  # pairs first, as in training
        names = list(find_pair(rows, PAIR_NAMES) or ())
    if not names:
        name = find(rows, TEXT_NAMES)
        names = [] if name is None else [name]
    if names:
        say(f"{rows.origin}: text from column {' and '.join(names)} (guessed; set --column to change it)")
    return names


def _guess_prompt(rows: Rows) -> list[str]:
    name = find(rows, MESSAGE_NAMES) or find(rows, PROMPT_NAMES)
    if name is None:
        return []
    return [name, "input"] if name == "instruction" and "input" in rows.columns else [name]


def _read_text(loaded: LoadedModel, rows: Rows, index: int, names: list[str]) -> str | tuple[str, ...] | None:
    limit = 2 if loaded.task_name in ("classify", "regress") else 1
    if len(names) > limit:
        raise DataError(
            f"a {loaded.task_name} model takes {limit} column(s), not {', '.join(names)}", "pass fewer columns"
        )
    if any(is_missing(rows.columns[name][index]) for name in names):
        return None
    for name in names:
        _check(rows, index, name)
    texts = tuple(str(rows.columns[name][index]) for name in names)
    return texts[0] if len(texts) == 1 else texts


def _read_messages(loaded: LoadedModel, rows: Rows, index: int, names: list[str]) -> Any:
    """Return the conversation before the answer to generate, composed as in training."""
    first = rows.columns[names[0]][index]
    if is_missing(first):
        return None
    columns = loaded.facts.get("columns", {})
    try:
        if not isinstance(first, list) and not (isinstance(first, str) and names[0] in MESSAGE_NAMES):
            return read_prompt(rows, index, names, columns.get("system"))
        messages = as_messages(first, names[0])
        tools_column = columns.get("tools") or "tools"
        tools = as_tools(rows.columns[tools_column][index], tools_column) if tools_column in rows.columns else None
    except BadMessages as error:
        raise DataError(f"{rows.location(index)}: {error.problem}", error.cure) from error
    if messages[-1]["role"] == "assistant" and len(messages) > 1:
        messages = messages[:-1]
    return {"messages": messages, "tools": tools} if tools else messages


def _check(rows: Rows, index: int, name: str) -> None:
    problem = text_problem(rows.columns[name][index], name)
    if problem is not None:
        raise DataError(f"{rows.location(index)}: {problem[0]}", problem[1])
