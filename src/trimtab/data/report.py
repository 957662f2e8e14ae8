"""What the model will see, put together for `trimtab data show`: real examples, lengths, balance, and duplicates.

`describe_data` collects it as a `DataReport`; `render` draws that for a terminal.
"""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from trimtab.data.report_values import DataReport, LabelCount, LengthBin, SetFacts, SharedText, ShownExample, ShownToken
from trimtab.data.rows import Rows
from trimtab.data.tokens import TokenDataset

__all__ = ["DataReport", "describe_data", "render"]

if TYPE_CHECKING:
    from rich.console import RenderableType

_NO_LOSS = -100
_NUM_BINS = 10
_LONG_PATTERN = 8
_OUTPUT_ROLES = {"label", "target", "answer"}  # what the model has to find, as opposed to what it is given
_ADDED_BY = {"chat": "by the chat template", "causal-lm": "around texts"}


def describe_data(
    task: Any,
    train_rows: Rows,
    eval_rows: Rows | None,
    train_tokens: TokenDataset,
    eval_tokens: TokenDataset | None,
    tokenizer: Any,
    num_examples: int = 3,
) -> DataReport:
    """Collect what a user should have seen before training on their data.

    Args:
        task: The task that made the tokens.
        train_rows: The rows to train on.
        eval_rows: The rows to evaluate on, if any.
        train_tokens: What the task made of the training rows.
        eval_tokens: What it made of the others.
        tokenizer: The tokenizer that was used.
        num_examples: How many training examples to show.
    """
    # Where rows were cut into blocks, an example belongs to no single row.
    one_to_one = len(train_tokens) == len(train_rows)
    examples = tuple(
        _example(task, train_tokens[index], tokenizer, train_rows.place(index) if one_to_one else None)
        for index in range(min(num_examples, len(train_tokens)))
    )
    written = _with_special_tokens(task, train_rows, tokenizer)
    shared, num_shared_rows = _shared_texts(task, train_rows, eval_rows)
    return DataReport(
        task=task.name,
        columns=dict(task.columns),
        said=tuple(task.said),
        examples=examples,
        special_tokens=_special_tokens(task, examples, tokenizer),
        num_texts_with_special_tokens=len(written),
        first_text_with_special_tokens=train_rows.place(written[0]) if written else None,
        train=_facts(task, train_rows, train_tokens),
        eval=None if eval_rows is None or eval_tokens is None else _facts(task, eval_rows, eval_tokens),
        histogram=_histogram(train_tokens.lengths),
        labels=_label_counts(task, train_tokens, eval_tokens),
        num_shared_texts=len(shared),
        num_shared_eval_rows=num_shared_rows,
        shared_texts=tuple(shared[:num_examples]),
    )


def _example(task: Any, example: dict[str, Any], tokenizer: Any, place: str | None) -> ShownExample:
    batch = task.collate([example])
    is_real = batch["attention_mask"][0].bool() if "attention_mask" in batch else slice(None)
    input_ids = batch["input_ids"][0][is_real].tolist()
    labels, target, label = [_NO_LOSS] * len(input_ids), [], None
    if task.loss_kind != "token-cross-entropy":
        label = _label_text(task, batch["labels"][0])
    elif task.model_kind == "seq2seq-lm":
        target = [token for token in batch["labels"][0].tolist() if token != _NO_LOSS]
    else:
        labels = batch["labels"][0][is_real].tolist()
        if task.shifts_labels and labels:
            labels[0] = _NO_LOSS  # nothing stands before it from which it could be told
    return ShownExample(
        place=place,
        tokens=_tokens(input_ids, labels, tokenizer),
        target=_tokens(target, target, tokenizer),
        text=task.example_text(example, tokenizer),
        label=label,
    )


def _tokens(input_ids: list[int], labels: list[int], tokenizer: Any) -> tuple[ShownToken, ...]:
    special = set(tokenizer.all_special_ids)
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(input_ids)]
    wanted = [label if label not in (_NO_LOSS, token) else None for token, label in zip(input_ids, labels, strict=True)]
    return tuple(
        ShownToken(
            text=name,
            id=token,
            is_special=token in special,
            carries_loss=label != _NO_LOSS,
            target=None if want is None else str(tokenizer.convert_ids_to_tokens([want])[0]),
        )
        for token, label, name, want in zip(input_ids, labels, names, wanted, strict=True)
    )


def _label_text(task: Any, label: torch.Tensor) -> str:
    names = task.head().get("id2label", {})
    if task.loss_kind == "cross-entropy":
        return str(names.get(int(label), int(label)))
    if task.loss_kind == "binary-cross-entropy":
        found = [str(names.get(index, index)) for index, value in enumerate(label.tolist()) if value > 0.5]
        return ", ".join(found) or "none of the labels"
    return ", ".join(f"{value:g}" for value in label.flatten().tolist())


def _special_tokens(task: Any, examples: tuple[ShownExample, ...], tokenizer: Any) -> str:
    """The answer to "do I add CLS and SEP myself?", read off the first example."""
    shown = examples[0].tokens if examples else ()
    pieces = [token.text if token.is_special and token.id != tokenizer.mask_token_id else "…" for token in shown]
    pattern = [piece for piece, _ in groupby(pieces)]
    if set(pattern) <= {"…"}:
        return "no special tokens are added"
    words = " ".join(pattern if len(pattern) <= _LONG_PATTERN else [*pattern[:_LONG_PATTERN], "…"])
    return f"special tokens added {_ADDED_BY.get(task.name, 'by the tokenizer')}: {words}: do not add them yourself"


def _input_columns(task: Any) -> list[str]:
    """The columns that the model is given, without those that it has to find."""
    roles = {role: columns for role, columns in task.columns.items() if role not in _OUTPUT_ROLES} or task.columns
    return [name for columns in roles.values() for name in ([columns] if isinstance(columns, str) else columns)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)


def _with_special_tokens(task: Any, rows: Rows, tokenizer: Any) -> list[int]:
    """Rows whose text has special tokens written in it, which the model would then see twice."""
    names = ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token")
    marks = {str(mark) for name in names if (mark := getattr(tokenizer, name, None)) and len(str(mark)) > 2}
    marks.discard(str(getattr(tokenizer, "unk_token", None)))  # corpora have <unk> in their texts, and mean it
    columns = [rows.columns[name] for name in _input_columns(task) if name in rows.columns]
    return [
        index
        for index in range(len(rows))
        if any(mark in text for column in columns for text in _strings(column[index]) for mark in marks)
    ]


def _shared_texts(task: Any, train_rows: Rows, eval_rows: Rows | None) -> tuple[list[SharedText], int]:
    """The distinct texts that stand in both sets, and the number of eval rows that hold one."""
    names = [name for name in _input_columns(task) if name in train_rows.columns]
    if eval_rows is None or not names or any(name not in eval_rows.columns for name in names):
        return [], 0
    first_place: dict[str, int] = {}
    for index in range(len(train_rows)):
        first_place.setdefault(_row_key(train_rows, names, index), index)
    found: dict[str, int] = {}
    num_rows = 0
    for index in range(len(eval_rows)):
        key = _row_key(eval_rows, names, index)
        if key in first_place:
            num_rows += 1
            found.setdefault(key, index)
    shared = []
    for key, index in found.items():
        text = " | ".join(text for name in names for text in _strings(eval_rows.columns[name][index]))
        shared.append(SharedText(text, train_rows.place(first_place[key]), eval_rows.place(index)))
    return shared, num_rows


def _row_key(rows: Rows, names: list[str], index: int) -> str:
    values = [rows.columns[name][index] for name in names]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(values, sort_keys=True, default=str)


def _facts(task: Any, rows: Rows, tokens: TokenDataset) -> SetFacts:
    lengths = sorted(tokens.lengths) or [0]
    labels = tokens.fields.get("labels") if task.loss_kind == "token-cross-entropy" else None
    return SetFacts(
        num_rows=len(rows),
        num_examples=len(tokens),
        num_truncated=tokens.num_truncated,
        num_tokens=sum(lengths),
        num_loss_tokens=None if labels is None else int((labels != _NO_LOSS).sum()),
        shortest=lengths[0],
        median=lengths[len(lengths) // 2],
        p95=lengths[min(len(lengths) * 95 // 100, len(lengths) - 1)],
        longest=lengths[-1],
    )


def _histogram(lengths: list[int]) -> tuple[LengthBin, ...]:
    """Equal bins from 1 to the longest."""
    longest = max(lengths, default=0)
    width = max(-(-longest // _NUM_BINS), 1)
    counts = [0] * -(-longest // width)
    for length in lengths:
        counts[max(length - 1, 0) // width] += 1
    return tuple(LengthBin(i * width + 1, min((i + 1) * width, longest), count) for i, count in enumerate(counts))


def _label_counts(task: Any, train: TokenDataset, evaluation: TokenDataset | None) -> tuple[LabelCount, ...]:
    if task.loss_kind not in ("cross-entropy", "binary-cross-entropy"):
        return ()
    names = task.head()["id2label"]
    counts = [_counts(tokens, len(names)) if tokens is not None else [0] * len(names) for tokens in (train, evaluation)]
    return tuple(LabelCount(str(names[i]), *both) for i, both in enumerate(zip(*counts, strict=True)))


def _counts(tokens: TokenDataset, num_labels: int) -> list[int]:
    labels = tokens.fields["labels"]
    if "labels" in tokens.offsets:  # several labels: a 0 or 1 for each
        return [int(count) for count in (labels.view(-1, num_labels) > 0.5).sum(0)]
    return [int(count) for count in torch.bincount(labels.long(), minlength=num_labels)]


def render(report: DataReport) -> "RenderableType":
    """A report for the terminal, also readable where there are no colours."""
    from trimtab.data.report_drawing import drawn

    return drawn(report)
