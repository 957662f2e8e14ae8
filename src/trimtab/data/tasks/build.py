"""From rows, and what the recipe says of them, to a task: what is clear is guessed and said, the rest is asked for."""

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tasks.causal_lm import CausalLM
from trimtab.data.tasks.chat import Chat
from trimtab.data.tasks.classify import Classify
from trimtab.data.tasks.columns import (
    ANSWER_NAMES,
    LABEL_NAMES,
    MESSAGE_NAMES,
    PROMPT_NAMES,
    SEQ2SEQ_NAMES,
    find,
    find_pair,
    find_text,
    first_value,
    is_identifier,
    listed,
    require,
)
from trimtab.data.tasks.label_columns import read_labels
from trimtab.data.tasks.labels import holds_fractions
from trimtab.data.tasks.masked_lm import MaskedLM
from trimtab.data.tasks.messages import Conversations, MessageColumn, PromptColumns
from trimtab.data.tasks.regress import Regress
from trimtab.data.tasks.seq2seq import Seq2Seq
from trimtab.data.tasks.texts import choose_text
from trimtab.errors import DataError

TASK_NAMES = ("classify", "regress", "causal-lm", "chat", "seq2seq", "masked-lm")
_PROMPT_AND_ANSWER = tuple((prompt, answer) for prompt in PROMPT_NAMES for answer in ANSWER_NAMES)


@dataclass(frozen=True)
class _Asked:
    """What the user said about columns; None where nothing was said."""

    text: str | Sequence[str] | None
    label: str | Sequence[str] | None
    target: str | None
    messages: str | None
    prompt: str | None
    answer: str | None


def build_task(
    name: str | None,
    rows: Rows,
    *,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    target: str | None = None,
    messages: str | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    eval_rows: Rows | None = None,
    label_names: list[str] | None = None,
    block_length: int | None = None,
    mask_share: float = 0.15,
    seed: int = 0,
    on_bad_rows: str = "stop",
) -> Task:
    """The task for these rows.

    Args:
        name: One of `TASK_NAMES`, or None to tell it from the columns.
        rows: The training rows.
        text: The column of the text, or two for sentence pairs.
        label: The column of the label or number, or one for each of several labels or numbers.
        target: The column that a sequence-to-sequence model is to write.
        messages: The column of conversations.
        prompt: The column of prompts.
        answer: The column of answers.
        eval_rows: Rows to evaluate on; that they can be used is checked at once.
        label_names: The labels in their order, where they are known beforehand (from a model that goes on learning).
        block_length: For causal-lm, the tokens in a block.
        mask_share: For masked-lm, the share of tokens to be named.
        seed: For masked-lm, chooses them.
        on_bad_rows: "stop" makes the first row that cannot be used an error; "skip" counts them.

    Raises:
        DataError: If the task or a column is not clear or not there, or eval rows cannot be used.
    """
    if len(rows) == 0:
        raise DataError(f"{rows.origin} has no rows", "give at least one row in data.train")
    asked = _Asked(text, label, target, messages, prompt, answer)
    said: list[str] = []
    if name is None:
        name, reason = _guess_task(rows, asked)
        said.append(f"task {name}: {reason} (guessed; task: says otherwise)")
    task: Task
    if name in ("classify", "regress"):
        task = _on_labels(name, rows, asked, label_names, said, on_bad_rows)
    elif name == "chat":
        task = Chat(_conversations(rows, asked, said), said, on_bad_rows)
    elif name == "seq2seq":
        task = _seq2seq(rows, asked, said, on_bad_rows)
    elif name in ("causal-lm", "masked-lm"):
        column = choose_text(rows, text, said, pairs=False).names[0]
        if name == "causal-lm":
            task = CausalLM(column, said, block_length, on_bad_rows)
        else:
            task = MaskedLM(column, said, mask_share, seed, on_bad_rows)
    else:
        raise DataError(f"there is no task {name!r}", f"set task to one of {', '.join(TASK_NAMES)}")
    if eval_rows is not None and on_bad_rows == "stop":
        task.usable(eval_rows)  # now, and not after the training rows were tokenized
    return task


def _guess_task(rows: Rows, asked: _Asked) -> tuple[str, str]:
    """The task and the reason for it, where the columns make it clear."""
    if asked.messages or asked.prompt or asked.answer:
        return "chat", "data.messages or data.prompt is set"
    if asked.target:
        return "seq2seq", "data.target is set"
    if asked.label:
        return _labelled(rows, asked.label)
    conversations = _find_messages(rows)
    if conversations is not None:
        return "chat", f"column {conversations!r} holds messages"
    plain_label = find(rows, LABEL_NAMES[:2])
    if plain_label is not None:
        return _labelled(rows, plain_label)
    for name, pairs in (("chat", _PROMPT_AND_ANSWER), ("seq2seq", SEQ2SEQ_NAMES)):
        pair = find_pair(rows, pairs)
        # A column "target" or "answer" may as well hold classes.
        if pair is not None and not any(isinstance(first_value(rows, column), int | float) for column in pair):
            return name, f"columns {pair[0]!r} and {pair[1]!r}"
    label = find(rows, LABEL_NAMES)
    if label is not None:
        return _labelled(rows, label)
    text = asked.text if isinstance(asked.text, str) else find_text(rows)
    others = [name for name in rows.names if name != text and not is_identifier(name)]
    if text is not None and not others:
        return "causal-lm", f"there is text in column {text!r} and no label"
    raise DataError(
        f"{rows.origin}: it is not clear what to learn from the columns {listed(rows.names)}",
        f"set task to one of {', '.join(TASK_NAMES)}, and data.label, data.target or data.messages to its column",
    )


def _labelled(rows: Rows, label: str | Sequence[str]) -> tuple[str, str]:
    columns = [label] if isinstance(label, str) else list(label)
    for name in columns:
        require(rows, name, "data.label")
    if all(name not in rows.label_names and holds_fractions(rows.columns[name]) for name in columns):
        return "regress", f"column {listed(columns)} holds numbers"
    return "classify", f"column {listed(columns)} holds labels"


def _on_labels(
    name: str, rows: Rows, asked: _Asked, label_names: list[str] | None, said: list[str], on_bad_rows: str
) -> Task:
    label = asked.label if asked.label is not None else _choose_label(rows, asked, said)
    labels = [label] if isinstance(label, str) else list(label)
    for column in labels:
        require(rows, column, "data.label")
    texts = choose_text(rows, asked.text, said, besides=labels)
    if name == "regress":
        return Regress(texts, labels, said, on_bad_rows)
    reader = read_labels(rows, label, label_names)
    kind = "several labels a row" if reader.several else "one label a row"
    said.append(f"{len(reader.labels)} labels ({listed(reader.labels.names)}), {kind}")
    return Classify(texts, reader, said, on_bad_rows)


def _choose_label(rows: Rows, asked: _Asked, said: list[str]) -> str:
    texts = [asked.text] if isinstance(asked.text, str) else list(asked.text or ())
    label = find(rows, LABEL_NAMES, besides=texts)
    if label is None:
        text = texts or [find_text(rows) or ""]
        others = [name for name in rows.names if name not in text and not is_identifier(name)]
        label = others[0] if len(others) == 1 and len(rows.names) > 1 else None
    if label is None:
        raise DataError(
            f"{rows.origin}: it is not clear which column holds the label; there are {listed(rows.names)}",
            "set data.label to its name",
        )
    said.append(f"label from the column {label!r} (guessed; data.label says otherwise)")
    return label


def _find_messages(rows: Rows) -> str | None:
    """A column by one of the usual names that holds lists, or lists written as JSON."""
    for name in MESSAGE_NAMES:
        for column in rows.names:
            if column.strip().casefold() != name:
                continue
            value = first_value(rows, column)
            if isinstance(value, list | tuple) or (isinstance(value, str) and value.lstrip().startswith("[{")):
                return column
    return None


def _conversations(rows: Rows, asked: _Asked, said: list[str]) -> Conversations:
    if asked.messages is not None:
        return MessageColumn(require(rows, asked.messages, "data.messages"))
    if asked.prompt is None and asked.answer is None:
        column = _find_messages(rows)
        if column is not None:
            said.append(f"conversations from the column {column!r} (guessed; data.messages says otherwise)")
            return MessageColumn(column)
    pair = find_pair(rows, _PROMPT_AND_ANSWER)
    prompt = asked.prompt or (pair[0] if pair else find(rows, ("", "", *PROMPT_NAMES)))
    answer = asked.answer or (pair[1] if pair else find(rows, ("", "", *ANSWER_NAMES)))
    if prompt is None or answer is None or prompt == answer:
        raise DataError(
            f"{rows.origin}: it is not clear which columns hold the conversations; there are {listed(rows.names)}",
            "set data.messages to a column of messages, or data.prompt and data.answer to one column each",
        )
    prompts = [require(rows, prompt, "data.prompt")]
    require(rows, answer, "data.answer")
    # The usual shape of instruction data: an instruction, what it is about, and the output.
    if asked.prompt is None and prompt.casefold() == "instruction":
        prompts += [name for name in rows.names if name.casefold() in ("input", "context") and name != answer]
    system = next((name for name in rows.names if name.casefold() in ("system", "system_prompt")), None)
    if asked.prompt is None or asked.answer is None:
        found = f"prompts from {listed(prompts)}, answers from {answer!r}"
        said.append(f"{found} (guessed; data.prompt, data.answer say otherwise)")
    if system is not None:
        said.append(f"system prompts from the column {system!r} (guessed)")
    return PromptColumns(prompts, answer, system)


def _seq2seq(rows: Rows, asked: _Asked, said: list[str], on_bad_rows: str) -> Seq2Seq:
    if asked.text is not None and not isinstance(asked.text, str):
        raise DataError(f"data.text names {len(asked.text)} columns", "name one column that is read")
    pair = find_pair(rows, (*SEQ2SEQ_NAMES, *_PROMPT_AND_ANSWER))
    source = asked.text or (pair[0] if pair else find_text(rows, [asked.target] if asked.target else []))
    target = asked.target or (pair[1] if pair else None)
    if source is None or target is None or source == target:
        raise DataError(
            f"{rows.origin}: it is not clear what is read and what is written; there are {listed(rows.names)}",
            "set data.text and data.target to one column each",
        )
    require(rows, source, "data.text")
    require(rows, target, "data.target")
    if asked.text is None or asked.target is None:
        said.append(f"reads {source!r}, writes {target!r} (guessed; data.text, data.target say otherwise)")
    return Seq2Seq(source, target, said, on_bad_rows)
