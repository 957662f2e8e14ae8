"""Conversations as lists of {"role", "content"}: from a column of messages, or from columns of prompts and answers."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Columns
from trimtab.data.tasks.columns import is_missing, require
from trimtab.data.tasks.texts import MOST_CHARACTERS, text_problem, too_long

Message = dict[str, Any]
# What people write in the place of our three roles.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant", "chatbot": "assistant"}
_CURE = 'write a list of messages such as {"role": "user", "content": "…"}'


class BadMessages(ValueError):
    """A row that holds no conversation to learn from.

    Args:
        problem: What is wrong with it.
        cure: What mends it.
    """

    def __init__(self, problem: str, cure: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.cure = cure


class Conversations(Protocol):
    """Where conversations stand in the rows."""

    columns: Columns

    def of(self, rows: Rows, index: int) -> list[Message]:
        """The conversation of a row.

        Raises:
            BadMessages: If there is none, or no answer in it.
        """
        ...


class MessageColumn:
    """A column that holds a list of messages, in the words of the chat templates or of ShareGPT."""

    def __init__(self, column: str) -> None:
        self.columns: Columns = {"messages": column}
        self._column = column

    def of(self, rows: Rows, index: int) -> list[Message]:
        """The messages of a row."""
        value = rows.columns[require(rows, self._column, "data.messages")][index]
        return checked(as_messages(value, self._column), self._column)


class PromptColumns:
    """Columns that hold a prompt and its answer; a second prompt column (context) and a system prompt may be empty."""

    def __init__(self, prompt: Sequence[str], answer: str, system: str | None = None) -> None:
        self.columns: Columns = {"prompt": prompt[0] if len(prompt) == 1 else list(prompt), "answer": answer}
        if system is not None:
            self.columns["system"] = system
        self._prompt = list(prompt)
        self._answer = answer
        self._system = system

    def of(self, rows: Rows, index: int) -> list[Message]:
        """The conversation of one question and one answer."""
        row = {
            name: rows.columns[require(rows, name, key)][index]
            for key, names in (("data.prompt", self._prompt), ("data.answer", [self._answer]))
            for name in names
        }
        messages: list[Message] = []
        if self._system is not None and not is_missing(rows.columns[self._system][index]):
            messages.append({"role": "system", "content": str(rows.columns[self._system][index])})
        first = row[self._prompt[0]]
        if isinstance(first, list):  # a prompt may be a whole conversation so far
            messages += as_messages(first, self._prompt[0])
        else:
            _check_text(first, self._prompt[0])
            parts = [str(row[name]) for name in self._prompt if not is_missing(row[name])]
            messages.append({"role": "user", "content": "\n\n".join(parts)})
        answer = row[self._answer]
        if isinstance(answer, list):
            messages += as_messages(answer, self._answer)
        else:
            _check_text(answer, self._answer)
            messages.append({"role": "assistant", "content": str(answer)})
        return checked(messages, self._answer)


def _check_text(value: Any, column: str) -> None:
    problem = text_problem(value, column)
    if problem is not None:
        raise BadMessages(*problem)


def as_messages(value: Any, column: str) -> list[Message]:
    """A cell as messages; a table of text files holds them as JSON.

    Raises:
        BadMessages: If the cell holds no list of messages.
    """
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise BadMessages(f"column {column!r} holds broken JSON ({error})", _CURE) from error
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
            raise BadMessages(f"column {column!r} holds JSON that cannot be read", _CURE) from error
    if not isinstance(value, list | tuple) or not value:
        found = "nothing" if is_missing(value) or value == [] else f"a {type(value).__name__}"
        raise BadMessages(f"column {column!r} holds {found} where a list of messages is expected", _CURE)
    return [_message(entry, column) for entry in value]


def _message(entry: Any, column: str) -> Message:
    if not isinstance(entry, dict):
        raise BadMessages(f"column {column!r} holds a {type(entry).__name__} where a message is expected", _CURE)
    if "role" not in entry and "from" in entry:
        renamed = {"from": "role", "value": "content"}
        entry = {renamed.get(key, key): value for key, value in entry.items()}
    role = entry.get("role")
    if not isinstance(role, str) or not role.strip():
        raise BadMessages(f"column {column!r} holds a message without a role: {_short(entry)}", _CURE)
    # Tables fill up keys that only some messages have with None; a template would take them for given.
    kept = {key: value for key, value in entry.items() if value is not None}
    return {"content": "", **kept, "role": _ROLES.get(role.casefold(), role.casefold())}


def checked(messages: list[Message], column: str) -> list[Message]:
    """The conversation, if there is something to learn in it.

    Raises:
        BadMessages: If no message is an answer, one is empty, or all together are too long to be tokenized.
    """
    answers = [message for message in messages if message["role"] == "assistant"]
    if not answers:
        roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
        raise BadMessages(
            f"column {column!r} holds no answer: the roles are {roles}", 'give a message with the role "assistant"'
        )
    for message in answers:
        if is_missing(message["content"]) and not message.get("tool_calls"):
            raise BadMessages(f"column {column!r} holds an empty answer", "write an answer or remove the row")
    num_characters = sum(len(message["content"]) for message in messages if isinstance(message["content"], str))
    if num_characters > MOST_CHARACTERS:
        raise BadMessages(*too_long(column, num_characters))
    return messages


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
