"""The base class of tasks: rows to token examples, examples to batches, the model's head, and metrics.

A task is built once from the training rows (`build.build_task`) and bound to a tokenizer. The rest of the program uses
only the methods of `Task`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trimtab.data.bad_rows import BadRows
from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.padding import pad, pad_token_id, token_mask
from trimtab.data.tasks.tokenization import backend_unchanged
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError

Columns = dict[str, str | list[str]]
Batch = dict[str, Tensor]
GENERATING_TASKS = ("causal-lm", "chat", "seq2seq")  # tasks whose models generate text
# What is wrong with a row and how to fix it; None for a good row.
Problem = tuple[str, str] | None


class Task:
    """Base class of tasks. A subclass implements `problem`, `encode_rows` and `collate`.

    Args:
        columns: The columns used, by role.
        notes: Log lines about what was guessed from the data.
        on_bad_rows: "stop" or "skip".

    Attributes:
        name: Value of `task` in a recipe.
        model_kind: "sequence-classification", "causal-lm", "seq2seq-lm" or "masked-lm".
        loss_kind: "cross-entropy", "binary-cross-entropy", "mse" or "token-cross-entropy".
        shifts_labels: Whether the logits at position t are scored against the label at t + 1.
        default_metric: Metric that selects the best model unless the recipe names one.
    """

    name: str
    model_kind: str
    loss_kind: str = "token-cross-entropy"
    shifts_labels: bool = False
    default_metric: str = "loss"

    def __init__(self, columns: Columns, notes: list[str], on_bad_rows: str = "stop") -> None:
        self.columns = columns
        self.notes = notes
        self.on_bad_rows = on_bad_rows
        self._pad_id: int | None = None
        self._uses_token_types = True

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that changes the result of `encode`; part of the key of the token cache."""
        return {"task": self.name, "columns": self.columns}

    @property
    def pad_id(self) -> int:
        """The token id that pads batches.

        Raises:
            DataError: Before `bind`.
        """
        if self._pad_id is None:
            raise DataError("the task is not bound to a tokenizer", "call task.bind(tokenizer) before collate")
        return self._pad_id

    def head(self) -> dict[str, Any]:
        """Settings of the model's config: number and names of labels, problem type. Empty for language models."""
        return {}

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Read what `collate` needs from the tokenizer, and from the model's config once it exists.

        `encode` calls it. Call it yourself before `collate` if the examples come from the cache.
        """
        self._pad_id = pad_token_id(tokenizer)
        if config is not None:
            # A decoder rejects token types, or embeds them as tokens (GPT-2); RoBERTa has an embedding for type 0 only.
            self._uses_token_types = (getattr(config, "type_vocab_size", None) or 0) > 1

    def problem(self, rows: Rows, index: int) -> Problem:
        """Return what is wrong with a row, or None."""
        raise NotImplementedError

    def usable(self, rows: Rows) -> Rows:
        """Return the rows without those that cannot be used.

        Raises:
            DataError: At the first bad row, unless bad rows are skipped.
        """
        bad = BadRows(self.on_bad_rows)
        kept: list[int] = []
        for index in range(len(rows)):
            problem = self.problem(rows, index)
            if problem is None:
                kept.append(index)
            else:
                bad.add(rows.location(index), *problem)
        bad.report(rows.origin)
        return rows if len(kept) == len(rows) else rows.select(kept)

    def notices(self, rows: Rows) -> list[str]:
        """Return lines about what is unusual in usable training rows."""
        return []

    def class_weights(self, wanted: str | Mapping[str, float], rows: Rows) -> tuple[float, ...]:
        """Return the weight of each label in the loss, given usable training rows.

        Raises:
            DataError: If rows do not have one label each.
        """
        raise DataError(
            f"train.class_weights is set, but a row of task {self.name} does not have exactly one label",
            "leave train.class_weights out",
        )

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize the usable rows to examples of at most `max_length` tokens."""
        with backend_unchanged(tokenizer):
            self.bind(tokenizer)
            return self.encode_rows(self.usable(rows), tokenizer, max_length)

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize rows that `usable` returned."""
        raise NotImplementedError

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad examples to one batch with labels. Only masked-lm depends on the epoch."""
        raise NotImplementedError

    def collate_inputs(self, examples: list[dict[str, Tensor]]) -> Batch:
        """Pad the token ids, with their attention mask, and token types if the model has embeddings for them."""
        mask = token_mask(examples)
        batch = {"input_ids": pad(examples, "input_ids", self.pad_id, mask), "attention_mask": mask.long()}
        if self._uses_token_types and "token_type_ids" in examples[0]:
            batch["token_type_ids"] = pad(examples, "token_type_ids", 0, mask)
        return batch

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Create accumulators of the named metrics, by default the usual ones of the loss."""
        num_labels = int(self.head().get("num_labels", 0))
        return Metrics(self.loss_kind, names, num_labels=num_labels, shifts_labels=self.shifts_labels)

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """Decode the tokens of an example, special tokens included."""
        return str(tokenizer.decode(example["input_ids"].tolist(), skip_special_tokens=False))
