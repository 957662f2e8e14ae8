"""Conversations as lists of {"role", "content"}: from a column of messages, or from prompt and answer columns."""

import json
from collections.abc import Sequence
from typing import Any

from trimtab.data.bad_rows import NESTED_TOO_DEEPLY, is_nested_too_deeply
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Columns
from trimtab.data.tasks.columns import is_missing, require
from trimtab.data.tasks.texts import MAX_CHARACTERS, text_problem, too_long

Message = dict[str, Any]
# Other names of the roles user and assistant.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant"}
_FIX = 'write a list of messages such as {"role": "user", "content": "…"}'


class BadMessages(ValueError):
    """A row without a conversation to train on.

    Args:
        problem: What is wrong with it.
        cure: How to fix it.
    """

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.cure = cure


class MessageColumn:
    """A column of message lists, with the keys of chat templates or of ShareGPT.

    Args:
        column: The column of the messages.
        tools: The column of the tools that the model may call in a conversation, as chat templates take them.
    """

    def __init__(self, column: str, tools: str | None = None) -> None:
        self.columns: Columns = {"messages": column}
        if tools is not None:
            self.columns["tools"] = tools
        self._column = column
        self._tools = tools

    def read(self, rows: Rows, index: int) -> list[Message]:
        """Return the messages of a row.

        Raises:
            BadMessages: If there are none, or none is an answer.
        """
        value = rows.columns[require(rows, self._column, "data.messages")][index]
        return check_messages(as_messages(value, self._column), self._column)

    def read_tools(self, rows: Rows, index: int) -> list[Any] | None:
        """Return the tools of a row, or None."""
        return None if self._tools not in rows.columns else as_tools(rows.columns[self._tools][index], self._tools)


class PromptColumns:
    """Columns of a prompt and its answer; the cells of further prompt columns and of the system prompt may be empty."""

    def __init__(self, prompt: Sequence[str], answer: str, system: str | None = None) -> None:
        self.columns: Columns = {"prompt": prompt[0] if len(prompt) == 1 else list(prompt), "answer": answer}
        if system is not None:
            self.columns["system"] = system
        self._prompt = list(prompt)
        self._answer = answer
        self._system = system

    def read(self, rows: Rows, index: int) -> list[Message]:
        """Return the conversation of one prompt and one answer.

        Raises:
            BadMessages: If prompt or answer is missing.
        """
        messages = read_prompt(rows, index, self._prompt, self._system)
        answer = rows.columns[require(rows, self._answer, "data.answer")][index]
        if isinstance(answer, list):
            messages += as_messages(answer, self._answer)
        else:
            _check_text(answer, self._answer)
            messages.append({"role": "assistant", "content": str(answer)})
        return check_messages(messages, self._answer)

    def read_tools(self, rows: Rows, index: int) -> None:
        """Return None: prompt columns have no tools."""


Conversations = MessageColumn | PromptColumns


def read_prompt(rows: Rows, index: int, prompt: Sequence[str], system: str | None) -> list[Message]:
    """Return the messages before an answer: the system prompt if there is one, and the prompt columns as one message.

    Raises:
        BadMessages: If the first prompt column is empty.
    """
    messages: list[Message] = []
    if system in rows.columns and not is_missing(rows.columns[system][index]):
        messages.append({"role": "system", "content": str(rows.columns[system][index])})
    cells = [rows.columns[require(rows, name, "data.prompt")][index] for name in prompt]
    if isinstance(cells[0], list):  # a prompt may be a conversation
        return messages + as_messages(cells[0], prompt[0])
    _check_text(cells[0], prompt[0])
    text = "\n\n".join(str(cell) for cell in cells if not is_missing(cell))
    return [*messages, {"role": "user", "content": text}]


def _check_text(value: Any, column: str) -> None:
    problem = text_problem(value, column)
    if problem is not None:
        raise BadMessages(*problem)


def as_messages(value: Any, column: str) -> list[Message]:
    """Convert a cell to messages; csv files contain them as JSON.

    Raises:
        BadMessages: If the cell is not a list of messages.
    """
    value = _parse_list(value, column)
    if is_nested_too_deeply(value):
        raise BadMessages(f"column {column!r}: {NESTED_TOO_DEEPLY}", _FIX)
    if not isinstance(value, list | tuple) or not value:
        found = "is empty" if is_missing(value) or value == [] else f"contains a {type(value).__name__}"
        raise BadMessages(f"column {column!r} {found}, expected a list of messages", _FIX)
    return [_message(entry, column) for entry in value]


def as_tools(value: Any, column: str) -> list[Any] | None:
    """Convert a cell to the tools of a conversation; None if there are none.

    Raises:
        BadMessages: If the cell is not a list.
    """
    value = _parse_list(value, column)
    if is_missing(value) or value == []:
        return None
    if not isinstance(value, list):
        raise BadMessages(
            f"column {column!r} contains a {type(value).__name__}, expected a list of tools", "write a list"
        )
    return value


def _parse_list(value: Any, column: str) -> Any:
    """Parse a JSON list; other values are returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise BadMessages(f"column {column!r} contains invalid JSON ({error})", _FIX) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, or lists nested too deeply
        raise BadMessages(f"column {column!r} contains JSON that cannot be parsed", _FIX) from error


def _message(entry: Any, column: str) -> Message:
    if not isinstance(entry, dict):
        raise BadMessages(f"column {column!r} contains a {type(entry).__name__}, expected a message", _FIX)
    if "role" not in entry and "from" in entry:
        renamed = {"from": "role", "value": "content"}
        entry = {renamed.get(key, key): value for key, value in entry.items()}
    role = entry.get("role")
    if not isinstance(role, str) or not role.strip():
        text = repr(entry)
        short = text if len(text) <= 80 else f"{text[:77]}..."
        raise BadMessages(f"column {column!r} contains a message without a role: {short}", _FIX)
    # Tables fill keys that only some messages have with None, and a template would treat those keys as present.
    kept = {key: value for key, value in entry.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = _text_of_parts(kept["content"], column)
    if "content" not in kept and not kept.get("tool_calls"):
        raise BadMessages(f"column {column!r} contains a message without content (role {role!r})", _FIX)
    return {"content": "", **kept, "role": _ROLES.get(role.casefold(), role.casefold())}


def _text_of_parts(parts: list[Any], column: str) -> str:
    """Return the text of a message in parts, as models for images and sounds take it."""
    others = [part.get("type") if isinstance(part, dict) else type(part) for part in parts if _text_of(part) is None]
    if others:
        raise BadMessages(
            f"column {column!r} contains a message with a part {others[0]!r}: text models are trained on text only",
            "remove the row, or write your own loop with trimtab.Engine",
        )
    return "".join(_text_of(part) or "" for part in parts)


def _text_of(part: Any) -> str | None:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    return text if isinstance(text, str) else None


def check_messages(messages: list[Message], column: str) -> list[Message]:
    """Return a conversation that contains something to learn.

    Raises:
        BadMessages: If no message is an answer, an answer is empty, or the conversation is too long to tokenize.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadMessages(
            f"column {column!r} contains no answer: the roles are {roles}", 'add a message with the role "assistant"'
        )
    for message in answers:
        if is_missing(message["content"]) and not message.get("tool_calls"):
            raise BadMessages(f"column {column!r} contains an empty answer", "write an answer or remove the row")
    num_characters = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
    if num_characters > MAX_CHARACTERS:
        raise BadMessages(*too_long(column, num_characters))
    return messages
