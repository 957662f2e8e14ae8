"""Regression: one number, or several, for a text or a sentence pair."""

from typing import Any

import torch
from torch import Tensor

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.columns import require
from trimtab.data.tasks.labels import as_number
from trimtab.data.tasks.texts import TextColumns
from trimtab.data.tokens import TokenDataset


class Regress(Task):
    """Predict the numbers of a text, trained with mean squared error.

    Args:
        texts: The text column or columns.
        numbers: The columns of the numbers.
        notes, on_bad_rows: As in `Task`.
    """

    name = "regress"
    model_kind = "sequence-classification"
    loss_kind = "mse"
    default_metric = "mse"

    def __init__(self, texts: TextColumns, numbers: list[str], notes: list[str], on_bad_rows: str = "stop") -> None:
        columns = {"text": texts.as_role, "label": numbers[0] if len(numbers) == 1 else numbers}
        super().__init__(columns, notes, on_bad_rows)
        self._texts = texts
        self._numbers = numbers

    def head(self) -> dict[str, Any]:
        """One output per number."""
        names = dict(enumerate(self._numbers))
        return {
            "num_labels": len(names),
            "id2label": names,
            "label2id": {name: number for number, name in names.items()},
            "problem_type": "regression",
        }

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing text or a value that is not a finite number."""
        for name in self._numbers:
            value = rows.columns[require(rows, name, "data.label")][index]
            if as_number(value) is None:
                return f"column {name!r} contains {value!r}, expected a number", "write a number"
        return self._texts.problem(rows, index)

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize texts, with their numbers as labels."""
        numbers = [[float(value) for value in rows.columns[name]] for name in self._numbers]
        labels = numbers[0] if len(numbers) == 1 else [list(row) for row in zip(*numbers, strict=True)]
        return self._texts.encode(rows, tokenizer, max_length, labels)

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad a batch. Labels have shape [rows], or [rows, numbers] if there are several."""
        labels = torch.stack([example["labels"] for example in examples]).float()
        return self.collate_inputs(examples) | {"labels": labels}
