"""Build a task from rows and the recipe's keys. Columns and task are guessed if the column names are clear."""

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
    column_list,
    find,
    find_pair,
    find_text,
    first_value,
    is_identifier,
    list_values,
    require,
)
from trimtab.data.tasks.label_columns import read_labels, read_labels_of_model
from trimtab.data.tasks.labels import are_regression_targets
from trimtab.data.tasks.masked_lm import MaskedLM
from trimtab.data.tasks.messages import Conversations, MessageColumn, PromptColumns
from trimtab.data.tasks.regress import Regress
from trimtab.data.tasks.seq2seq import Seq2Seq
from trimtab.data.tasks.texts import choose_text
from trimtab.errors import DataError

TASK_NAMES = ("classify", "regress", "causal-lm", "chat", "seq2seq", "masked-lm")
_MEDIA_NAMES = {"image", "images", "video", "videos", "audio", "audios"}
_PROMPT_AND_ANSWER = tuple((prompt, answer) for prompt in PROMPT_NAMES for answer in ANSWER_NAMES)


@dataclass(frozen=True)
class _NamedColumns:
    """The columns that the recipe names; None for those to guess."""

    text: str | Sequence[str] | None
    label: str | Sequence[str] | None
    target: str | None
    messages: str | None
    prompt: str | None
    answer: str | None

    @property
    def labels(self) -> list[str]:
        """The label columns; empty if none is named."""
        return [self.label] if isinstance(self.label, str) else list(self.label or ())


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
    seed: int = 0,
    on_bad_rows: str = "stop",
) -> Task:
    """Build the task for these rows.

    Args:
        name: One of `TASK_NAMES`, or None to guess it from the columns.
        rows: The training rows.
        text: The text column, or two for sentence pairs.
        label: The column of the label or number, or one column for each of several.
        target: The column that a sequence-to-sequence model generates.
        messages: The column of conversations.
        prompt: The column of prompts.
        answer: The column of answers.
        eval_rows: The eval rows; bad ones are reported before any row is tokenized.
        seed: For masked-lm, decides which tokens are masked.
        on_bad_rows: "stop" raises at the first row that cannot be used; "skip" drops and counts such rows.

    Raises:
        DataError: If the task or a column is ambiguous or missing, or eval rows cannot be used.
    """
    if len(rows) == 0:
        raise DataError(f"{rows.origin} has no rows", "add at least one row to data.train")
    named = _NamedColumns(text, label, target, messages, prompt, answer)
    notes: list[str] = []
    if name is None:
        name, reason = _guess_task(rows, named)
        notes.append(f"task {name}: {reason} (guessed; set task to change it)")
    task: Task
    if name in ("classify", "regress"):
        task = _build_labelled(name, rows, named, notes, on_bad_rows)
    elif name == "chat":
        task = Chat(_choose_conversations(rows, named, notes), notes, on_bad_rows)
    elif name == "seq2seq":
        task = _build_seq2seq(rows, named, notes, on_bad_rows)
    elif name == "causal-lm":
        task = CausalLM(choose_text(rows, text, notes, pairs=False), notes, on_bad_rows)
    elif name == "masked-lm":
        task = MaskedLM(choose_text(rows, text, notes, pairs=False), notes, seed, on_bad_rows)
    else:
        raise DataError(f"unknown task {name!r}", f"set task to one of {', '.join(TASK_NAMES)}")
    if eval_rows is not None:
        _check_eval_columns(task, eval_rows)
        if on_bad_rows == "stop":
            task.usable(eval_rows)
    return task


def _check_eval_columns(task: Task, rows: Rows) -> None:
    """Refuse eval rows without a column that the task reads; columns of tools and system prompts may be missing."""
    values = [value for role, value in task.columns.items() if role not in ("tools", "system")]
    needed = [name for value in values for name in column_list(value)]
    missing = [name for name in needed if name not in rows.columns]
    if missing and len(rows):
        raise DataError(
            f"{rows.origin} has no column {missing[0]!r}; the columns are {list_values(rows.names)}",
            f"data.eval needs the columns of data.train: {list_values(needed)}; leave it out to hold out training rows",
        )


def build_task_of_classifier(
    rows: Rows,
    names: Sequence[str],
    *,
    several: bool = False,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
) -> Task:
    """Build the task of a trained classifier, whose labels are known.

    Args:
        rows: Rows to evaluate it on; they may have some of its labels only.
        names: Its labels, in the order of its outputs.
        several: Whether it predicts several labels per row.
        text: The text column, or two for sentence pairs.
        label: The column of the label, or one column for each of several.

    Raises:
        DataError: If a column is ambiguous or missing.
    """
    named = _NamedColumns(text, label, None, None, None, None)
    notes: list[str] = []
    labels = named.labels
    if not labels:
        are_columns = several and all(name in rows.columns for name in names)
        labels = list(names) if are_columns else [_choose_label(rows, named, notes)]
    for column in labels:
        require(rows, column, "data.label")
    texts = choose_text(rows, text, notes, besides=labels)
    return Classify(texts, read_labels_of_model(rows, labels, names, several=several), notes)


def _guess_task(rows: Rows, named: _NamedColumns) -> tuple[str, str]:
    """Return the task and the reason for the guess."""
    _ask_about_preferences(rows, named)
    if named.messages or named.prompt or named.answer:
        return "chat", "data.messages or data.prompt is set"
    if named.target:
        return "seq2seq", "data.target is set"
    if named.label:
        return _guess_labelled(rows, named.labels)
    conversations = _find_messages(rows)
    if conversations is not None:
        return "chat", f"column {conversations!r} contains messages"
    plain_label = find(rows, LABEL_NAMES[:2])
    if plain_label is not None:
        return _guess_labelled(rows, [plain_label])
    for name, pairs in (("chat", _PROMPT_AND_ANSWER), ("seq2seq", SEQ2SEQ_NAMES)):
        pair = find_pair(rows, pairs)
        # A column "target" or "answer" may contain class numbers.
        if pair is not None and not any(isinstance(first_value(rows, column), int | float) for column in pair):
            return name, f"columns {pair[0]!r} and {pair[1]!r}"
    label = find(rows, LABEL_NAMES)
    if label is not None:
        return _guess_labelled(rows, [label])
    text = named.text if isinstance(named.text, str) else find_text(rows)
    others = [name for name in rows.names if name != text and not is_identifier(name)]
    if text is not None and not others:
        return "causal-lm", f"column {text!r} contains text and there is no label"
    raise DataError(
        f"{rows.origin}: cannot tell the task from the columns {list_values(rows.names)}",
        f"set task to one of {', '.join(TASK_NAMES)}, and data.label, data.target or data.messages to its column",
    )


def _ask_about_preferences(rows: Rows, named: _NamedColumns) -> None:
    """Refuse to guess what a boolean label beside conversations means: it often marks answers as good or bad."""
    column = None if named.label else find(rows, LABEL_NAMES[:2])
    answers = named.messages or named.answer or _find_messages(rows)
    pair = find_pair(rows, _PROMPT_AND_ANSWER)
    answers = answers or (pair[1] if pair is not None and named.text is None else None)
    if column is None or answers is None or not isinstance(first_value(rows, column), bool):
        return
    num_false = rows.columns[column].count(False)
    raise DataError(
        f"{rows.origin}: column {column!r} is false in {num_false:,} of {len(rows):,} rows with answers: "
        "training on preferences is not supported yet, and bad answers would be learned like good ones",
        "keep only the rows with good answers, or set task: chat to learn all answers",
    )


def _guess_labelled(rows: Rows, columns: list[str]) -> tuple[str, str]:
    for name in columns:
        require(rows, name, "data.label")
    if all(name not in rows.label_names and are_regression_targets(rows.columns[name]) for name in columns):
        return "regress", f"column {list_values(columns)} contains numbers"
    return "classify", f"column {list_values(columns)} contains labels"


def _build_labelled(name: str, rows: Rows, named: _NamedColumns, notes: list[str], on_bad_rows: str) -> Task:
    labels = named.labels or [_choose_label(rows, named, notes)]
    for column in labels:
        require(rows, column, "data.label")
    texts = choose_text(rows, named.text, notes, besides=labels)
    both = next((column for column in labels if column in texts.names), None)
    if both is not None:
        raise DataError(
            f"data.text and data.label are the same column {both!r}: the model would read the label",
            f"set one of them to another column of {rows.origin}: {list_values(rows.names)}",
        )
    if name == "regress":
        return Regress(texts, labels, notes, on_bad_rows)
    reader = read_labels(rows, labels)
    kind = "several labels per row" if reader.several else "one label per row"
    notes.append(f"{len(reader.labels)} labels ({list_values(reader.labels.names)}), {kind}")
    return Classify(texts, reader, notes, on_bad_rows)


def _choose_label(rows: Rows, named: _NamedColumns, notes: list[str]) -> str:
    texts = [named.text] if isinstance(named.text, str) else list(named.text or ())
    label = find(rows, LABEL_NAMES, besides=texts)
    if label is None:
        text = texts or [find_text(rows) or ""]
        others = [name for name in rows.names if name not in text and not is_identifier(name)]
        label = others[0] if len(others) == 1 and len(rows.names) > 1 else None
    if label is None:
        raise DataError(
            f"{rows.origin}: cannot tell which column is the label; the columns are {list_values(rows.names)}",
            "set data.label to its name",
        )
    notes.append(f"label: column {label!r} (guessed; set data.label to change it)")
    return label


def _contains_lists(rows: Rows, column: str) -> bool:
    """Whether a column contains lists of dicts, or such lists as JSON."""
    value = first_value(rows, column)
    return isinstance(value, list | tuple) or (isinstance(value, str) and value.lstrip().startswith("[{"))


def _find_messages(rows: Rows) -> str | None:
    """Return a column of lists with one of the usual names."""
    for name in MESSAGE_NAMES:
        for column in rows.names:
            if column.strip().casefold() == name and _contains_lists(rows, column):
                return column
    return None


def _choose_conversations(rows: Rows, named: _NamedColumns, notes: list[str]) -> Conversations:
    _refuse_media(rows)
    column = named.messages
    if column is not None:
        require(rows, column, "data.messages")
    elif named.prompt is None and named.answer is None:
        column = _find_messages(rows)
        if column is not None:
            notes.append(f"conversations: column {column!r} (guessed; set data.messages to change it)")
    if column is None:
        return _choose_prompts(rows, named, notes)
    tools = next((name for name in rows.names if name == "tools" and _contains_lists(rows, name)), None)
    if tools is not None:
        notes.append(f"tools of the conversations: column {tools!r} (rename it to leave them out)")
    return MessageColumn(column, tools)


def _refuse_media(rows: Rows) -> None:
    """Refuse conversations about images, videos or sounds, which a text model would not see."""
    for column in rows.names:
        if column.strip().casefold() in _MEDIA_NAMES and first_value(rows, column) not in (None, []):
            raise DataError(
                f"{rows.origin}: column {column!r} belongs to the conversations; the model would see only the text",
                f"train on text (remove the column {column!r}), or write your own loop with trimtab.Engine",
            )


def _choose_prompts(rows: Rows, named: _NamedColumns, notes: list[str]) -> PromptColumns:
    pair = find_pair(rows, _PROMPT_AND_ANSWER)
    prompt = named.prompt or (pair[0] if pair else find(rows, ("", "", *PROMPT_NAMES)))
    answer = named.answer or (pair[1] if pair else find(rows, ("", "", *ANSWER_NAMES)))
    if prompt is None or answer is None or prompt == answer:
        raise DataError(
            f"{rows.origin}: cannot tell which columns are the conversations; the columns are "
            f"{list_values(rows.names)}",
            "set data.messages to a column of messages, or data.prompt and data.answer to one column each",
        )
    prompts = [require(rows, prompt, "data.prompt")]
    require(rows, answer, "data.answer")
    # Instruction data often has three columns: instruction, input (or context) and output.
    if named.prompt is None and prompt.casefold() == "instruction":
        prompts += [name for name in rows.names if name.casefold() in ("input", "context") and name != answer]
    system = next((name for name in rows.names if name.casefold() in ("system", "system_prompt")), None)
    if named.prompt is None or named.answer is None:
        found = f"prompts: {list_values(prompts)}, answers: {answer!r}"
        notes.append(f"{found} (guessed; set data.prompt and data.answer to change it)")
    if system is not None:
        notes.append(f"system prompts: column {system!r} (guessed)")
    return PromptColumns(prompts, answer, system)


def _build_seq2seq(rows: Rows, named: _NamedColumns, notes: list[str], on_bad_rows: str) -> Seq2Seq:
    if named.text is not None and not isinstance(named.text, str):
        raise DataError(f"data.text names {len(named.text)} columns", "set data.text to one column")
    pair = find_pair(rows, (*SEQ2SEQ_NAMES, *_PROMPT_AND_ANSWER))
    source = named.text or (pair[0] if pair else find_text(rows, [named.target] if named.target else []))
    target = named.target or (pair[1] if pair else None)
    if source is None or target is None or source == target:
        raise DataError(
            f"{rows.origin}: cannot tell source and target; the columns are {list_values(rows.names)}",
            "set data.text and data.target to one column each",
        )
    require(rows, source, "data.text")
    require(rows, target, "data.target")
    if named.text is None or named.target is None:
        notes.append(f"source: {source!r}, target: {target!r} (guessed; set data.text and data.target to change it)")
    return Seq2Seq(source, target, notes, on_bad_rows)
