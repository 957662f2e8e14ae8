"""Classification of texts or sentence pairs, with one label or several labels per row."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.label_columns import FlagColumns, LabelColumns, OneLabel
from trimtab.data.tasks.labels import class_weights, imbalance, suspicious_labels
from trimtab.data.tasks.texts import TextColumns
from trimtab.data.tokens import TokenDataset


class Classify(Task):
    """Predict the label, or the labels, of a text.

    Args:
        texts: The text column or columns.
        labels: The reader of the labels.
        notes, on_bad_rows: As in `Task`.
    """

    name = "classify"
    model_kind = "sequence-classification"

    def __init__(self, texts: TextColumns, labels: LabelColumns, notes: list[str], on_bad_rows: str = "stop") -> None:
        super().__init__({"text": texts.as_role, "label": labels.as_role}, notes, on_bad_rows)
        self.loss_kind = "binary-cross-entropy" if labels.several else "cross-entropy"
        self.default_metric = "f1" if labels.several else "accuracy"
        self._texts = texts
        self._labels = labels

    @property
    def settings(self) -> dict[str, Any]:
        """Columns and label names."""
        return super().settings | {"labels": self._labels.labels.names}

    def head(self) -> dict[str, Any]:
        """Number and names of the labels."""
        names = self._labels.labels.names
        return {
            "num_labels": len(names),
            "id2label": dict(enumerate(names)),
            "label2id": {name: number for number, name in enumerate(names)},
            "problem_type": "multi_label_classification" if self._labels.several else "single_label_classification",
        }

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing text or an unknown label."""
        return self._texts.problem(rows, index) or self._labels.problem(rows, index)

    def notices(self, rows: Rows) -> list[str]:
        """Report labels that are probably mistakes, and labels with few rows."""
        labels = self._labels
        if isinstance(labels, FlagColumns):
            return []
        found = suspicious_labels(labels.labels.names, rows.origin)
        if isinstance(labels, OneLabel):
            found += imbalance(labels.labels.names, labels.values(rows), rows.origin)
        return found

    def class_weights(self, wanted: str | Mapping[str, float], rows: Rows) -> tuple[float, ...]:
        """Return the weight of each label in the loss, given usable training rows."""
        if not isinstance(self._labels, OneLabel):
            return super().class_weights(wanted, rows)
        return class_weights(wanted, self._labels.labels.names, self._labels.values(rows))

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize texts and number the labels."""
        return self._texts.encode(rows, tokenizer, max_length, self._labels.values(rows))

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad a batch. Labels are class indices (int64), or one 0.0 or 1.0 per label if a row may have several."""
        labels = torch.stack([example["labels"] for example in examples])
        return self.collate_inputs(examples) | {"labels": labels.float() if self._labels.several else labels.long()}
