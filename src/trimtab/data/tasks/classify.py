"""Classification of texts or sentence pairs, with one label a row or with several."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Columns, Problem, without_bad_rows
from trimtab.data.tasks.inputs import EncoderInputs
from trimtab.data.tasks.label_columns import LabelColumns
from trimtab.data.tasks.texts import TextColumns
from trimtab.data.tokens import TokenDataset


class Classify:
    """Learn the label, or the labels, of a text.

    Args:
        texts: The column or two columns of the text.
        labels: How labels are read.
        said: Lines for the user about what was guessed.
        on_bad_rows: "stop" or "skip".
    """

    name = "classify"
    model_kind = "sequence-classification"
    shifts_labels = False

    def __init__(self, texts: TextColumns, labels: LabelColumns, said: list[str], on_bad_rows: str = "stop") -> None:
        self.columns: Columns = {"text": texts.as_role, "label": labels.as_role}
        self.loss_kind = "binary-cross-entropy" if labels.several else "cross-entropy"
        self.default_metric = "f1" if labels.several else "accuracy"
        self.said = said
        self._texts = texts
        self._labels = labels
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()

    @property
    def settings(self) -> dict[str, Any]:
        """Columns and labels."""
        return {"task": self.name, "columns": self.columns, "labels": self._labels.labels.names}

    def head(self) -> dict[str, Any]:
        """The number of labels and their names."""
        names = self._labels.labels.names
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "multi_label_classification" if self._labels.several else "single_label_classification",
        }

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token, and whether the model knows token types."""
        self._inputs.bind(tokenizer, config)

    def usable(self, rows: Rows) -> Rows:
        """The rows that have a text and a known label."""

        def problem_of(index: int) -> Problem:
            return self._texts.problem(rows, index) or self._labels.problem(rows, index)

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Texts to tokens, labels to numbers."""
        self.bind(tokenizer)
        rows = self.usable(rows)
        tokenized = self._texts.tokenize(rows, tokenizer, max_length)
        return self._inputs.dataset(tokenized, {"labels": self._labels.values(rows)})

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """A padded batch; labels are class numbers, or a 0.0 or 1.0 for each label where a row may have several."""
        labels = torch.stack([example["labels"] for example in examples])
        return self._inputs.collate(examples) | {"labels": labels.float() if self._labels.several else labels.long()}

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss, accuracy and F1 unless others are named."""
        return Metrics(self.loss_kind, names, num_labels=len(self._labels.labels))

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The text as the model sees it."""
        return self._inputs.text(example, tokenizer)
