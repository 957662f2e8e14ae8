"""The report of `trimtab data show`: examples as the model sees them, lengths, label counts, and shared texts.

`describe_data` collects a `DataReport`; `report_table.render` formats it for a terminal.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from trimtab.data.notices import SharedText, input_columns, shared_texts
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Task
from trimtab.data.tasks.columns import strings_in
from trimtab.data.tasks.padding import IGNORED
from trimtab.data.tokens import TokenDataset

_NUM_BINS = 10
_MAX_PATTERN = 8
_ADDED_BY = {"chat": "by the chat template", "causal-lm": "around texts"}


@dataclass(frozen=True)
class ShownToken:
    """One token. `target` is the token to predict at this position, if it differs."""

    text: str
    id: int
    is_special: bool
    carries_loss: bool
    target: str | None = None


@dataclass(frozen=True)
class ShownExample:
    """One example as the model sees it; `target` is the sequence that an encoder-decoder generates."""

    location: str | None
    tokens: tuple[ShownToken, ...]
    target: tuple[ShownToken, ...]
    text: str
    label: str | None


@dataclass(frozen=True)
class SetSizes:
    """Sizes of one set. `num_loss_tokens` is None if the loss is not on tokens, or on others in every epoch."""

    num_rows: int
    num_examples: int
    num_truncated: int
    num_tokens: int
    num_loss_tokens: int | None
    shortest: int
    median: int
    p95: int
    longest: int


@dataclass(frozen=True)
class LengthBin:
    """How many training examples have `first` to `last` tokens."""

    first: int
    last: int
    num_examples: int


@dataclass(frozen=True)
class LabelCount:
    """Number of rows with a label in each set."""

    name: str
    num_train: int
    num_eval: int


@dataclass(frozen=True)
class DataCard:
    """Sizes, lengths and labels of the data of a run."""

    task: str
    columns: dict[str, str | list[str]]
    train: SetSizes
    eval: SetSizes | None
    histogram: tuple[LengthBin, ...]
    labels: tuple[LabelCount, ...]


@dataclass(frozen=True)
class DataReport(DataCard):
    """Everything that `trimtab data show` prints."""

    examples: tuple[ShownExample, ...]
    special_tokens: str
    num_texts_with_special_tokens: int
    first_text_with_special_tokens: str | None
    num_shared_texts: int
    num_shared_eval_rows: int
    shared_texts: tuple[SharedText, ...]


def describe_data(
    task: Task,
    train_rows: Rows,
    eval_rows: Rows | None,
    train_tokens: TokenDataset,
    eval_tokens: TokenDataset | None,
    tokenizer: Any,
    num_examples: int = 3,
) -> DataReport:
    """Collect what a user should check before training.

    Args:
        task: The task, bound to the tokenizer.
        train_rows: The training rows.
        eval_rows: The held-out rows, if any.
        train_tokens: The encoded training rows.
        eval_tokens: The encoded held-out rows.
        tokenizer: The tokenizer.
        num_examples: How many training examples to show.
    """
    # If rows were split into blocks, an example does not belong to one row.
    one_to_one = len(train_tokens) == len(train_rows)
    examples = tuple(
        _describe_example(task, train_tokens[index], tokenizer, train_rows.location(index) if one_to_one else None)
        for index in range(min(num_examples, len(train_tokens)))
    )
    with_special = _rows_with_special_tokens(task, train_rows, tokenizer)
    shared, num_shared_rows = shared_texts(task, train_rows, eval_rows)
    return DataReport(
        **vars(describe_sets(task, train_rows, eval_rows, train_tokens, eval_tokens)),
        examples=examples,
        special_tokens=_describe_special_tokens(task, examples, tokenizer),
        num_texts_with_special_tokens=len(with_special),
        first_text_with_special_tokens=train_rows.location(with_special[0]) if with_special else None,
        num_shared_texts=len(shared),
        num_shared_eval_rows=num_shared_rows,
        shared_texts=tuple(shared[:num_examples]),
    )


def describe_sets(
    task: Task,
    train_rows: Rows,
    eval_rows: Rows | None,
    train_tokens: TokenDataset,
    eval_tokens: TokenDataset | None,
    num_bins: int = _NUM_BINS,
) -> DataCard:
    """Collect what is cheap to know: sizes, lengths and labels.

    Args:
        task: The task.
        train_rows: The training rows.
        eval_rows: The held-out rows, if there are any.
        train_tokens: The training rows as tokens.
        eval_tokens: The held-out rows as tokens.
        num_bins: Bins of the histogram of lengths.
    """
    return DataCard(
        task=task.name,
        columns=dict(task.columns),
        train=_sizes(task, train_rows, train_tokens),
        eval=None if eval_rows is None or eval_tokens is None else _sizes(task, eval_rows, eval_tokens),
        histogram=_histogram(train_tokens.lengths, num_bins),
        labels=_label_counts(task, train_tokens, eval_tokens),
    )


def _describe_example(task: Task, example: dict[str, Any], tokenizer: Any, location: str | None) -> ShownExample:
    batch = task.collate([example])
    is_real = batch["attention_mask"][0].bool() if "attention_mask" in batch else slice(None)
    input_ids = batch["input_ids"][0][is_real].tolist()
    labels, target, label = [IGNORED] * len(input_ids), [], None
    if task.loss_kind != "token-cross-entropy":
        label = label_text(task, batch["labels"][0])
    elif task.model_kind == "seq2seq-lm":
        target = [token for token in batch["labels"][0].tolist() if token != IGNORED]
    else:
        labels = batch["labels"][0][is_real].tolist()
        if task.shifts_labels and labels:
            labels[0] = IGNORED  # the first token has no context to be predicted from
    return ShownExample(
        location=location,
        tokens=_describe_tokens(input_ids, labels, tokenizer),
        target=_describe_tokens(target, target, tokenizer),
        text=task.example_text(example, tokenizer),
        label=label,
    )


def _describe_tokens(input_ids: list[int], labels: list[int], tokenizer: Any) -> tuple[ShownToken, ...]:
    special = set(tokenizer.all_special_ids)
    names = [str(name) for name in tokenizer.convert_ids_to_tokens(input_ids)]
    wanted = [label if label not in (IGNORED, token) else None for token, label in zip(input_ids, labels, strict=True)]
    return tuple(
        ShownToken(
            text=name,
            id=token,
            is_special=token in special,
            carries_loss=label != IGNORED,
            target=None if want is None else str(tokenizer.convert_ids_to_tokens([want])[0]),
        )
        for token, label, name, want in zip(input_ids, labels, names, wanted, strict=True)
    )


def label_text(task: Task, label: torch.Tensor) -> str:
    """Return the label of a row, or a prediction in the same form, by name; for regression, the numbers."""
    names = task.head().get("id2label", {})
    if task.loss_kind == "cross-entropy":
        return str(names.get(int(label), int(label)))
    if task.loss_kind == "binary-cross-entropy":
        found = [str(names.get(index, index)) for index, value in enumerate(label.tolist()) if value > 0.5]
        return ", ".join(found) or "none of the labels"
    return ", ".join(f"{value:g}" for value in label.flatten().tolist())


def _describe_special_tokens(task: Task, examples: tuple[ShownExample, ...], tokenizer: Any) -> str:
    """Answer "do I have to add CLS and SEP?" from the first example."""
    shown = examples[0].tokens if examples else ()
    pieces = [token.text if token.is_special and token.id != tokenizer.mask_token_id else "…" for token in shown]
    pattern = [piece for piece, _ in groupby(pieces)]
    if set(pattern) <= {"…"}:
        return "no special tokens are added"
    shortened = " ".join(pattern if len(pattern) <= _MAX_PATTERN else [*pattern[:_MAX_PATTERN], "…"])
    return f"special tokens added {_ADDED_BY.get(task.name, 'by the tokenizer')}: {shortened}: do not add them yourself"


def _rows_with_special_tokens(task: Task, rows: Rows, tokenizer: Any) -> list[int]:
    """Return the rows whose text contains special tokens, which the model would see twice."""
    names = ("cls_token", "sep_token", "bos_token", "eos_token", "pad_token")
    tokens = {str(token) for name in names if (token := getattr(tokenizer, name, None)) and len(str(token)) > 2}
    tokens.discard(str(getattr(tokenizer, "unk_token", None)))  # some corpora have <unk> in their texts on purpose
    columns = [rows.columns[name] for name in input_columns(task) if name in rows.columns]
    return [
        index
        for index in range(len(rows))
        if any(token in text for column in columns for text in strings_in(column[index]) for token in tokens)
    ]


def _sizes(task: Task, rows: Rows, tokens: TokenDataset) -> SetSizes:
    lengths = sorted(tokens.lengths) or [0]
    labels = tokens.fields.get("labels") if task.loss_kind == "token-cross-entropy" else None
    return SetSizes(
        num_rows=len(rows),
        num_examples=len(tokens),
        num_truncated=tokens.num_truncated,
        num_tokens=sum(lengths),
        num_loss_tokens=None if labels is None else int((labels != IGNORED).sum()),
        shortest=lengths[0],
        median=lengths[len(lengths) // 2],
        p95=lengths[min(len(lengths) * 95 // 100, len(lengths) - 1)],
        longest=lengths[-1],
    )


def _histogram(lengths: list[int], num_bins: int) -> tuple[LengthBin, ...]:
    """Count lengths in equal bins from 1 to the longest."""
    longest = max(lengths, default=0)
    width = max(-(-longest // num_bins), 1)
    counts = [0] * -(-longest // width)
    for length in lengths:
        counts[max(length - 1, 0) // width] += 1
    return tuple(LengthBin(i * width + 1, min((i + 1) * width, longest), count) for i, count in enumerate(counts))


def _label_counts(task: Task, train: TokenDataset, evaluation: TokenDataset | None) -> tuple[LabelCount, ...]:
    if task.loss_kind not in ("cross-entropy", "binary-cross-entropy"):
        return ()
    names = task.head()["id2label"]
    counts = [_counts(tokens, len(names)) if tokens is not None else [0] * len(names) for tokens in (train, evaluation)]
    return tuple(LabelCount(str(names[i]), *both) for i, both in enumerate(zip(*counts, strict=True)))


def _counts(tokens: TokenDataset, num_labels: int) -> list[int]:
    labels = tokens.fields["labels"]
    if "labels" in tokens.offsets:  # several labels per row: one 0 or 1 per label
        return [int(count) for count in (labels.view(-1, num_labels) > 0.5).sum(0)]
    return [int(count) for count in torch.bincount(labels.long(), minlength=num_labels)]
