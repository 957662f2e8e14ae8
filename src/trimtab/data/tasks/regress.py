"""Regression: one number, or several, for a text or a sentence pair."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Columns, Problem, without_bad_rows
from trimtab.data.tasks.columns import require
from trimtab.data.tasks.inputs import EncoderInputs
from trimtab.data.tasks.labels import as_number
from trimtab.data.tasks.texts import TextColumns
from trimtab.data.tokens import TokenDataset


class Regress:
    """Learn the numbers that belong to a text, by mean squared error.

    Args:
        texts: The column or two columns of the text.
        numbers: The columns of the numbers, one or more.
        said: Lines for the user about what was guessed.
        on_bad_rows: "stop" or "skip".
    """

    name = "regress"
    model_kind = "sequence-classification"
    loss_kind = "mse"
    shifts_labels = False
    default_metric = "mse"

    def __init__(self, texts: TextColumns, numbers: list[str], said: list[str], on_bad_rows: str = "stop") -> None:
        self.columns: Columns = {"text": texts.as_role, "label": numbers[0] if len(numbers) == 1 else numbers}
        self.said = said
        self._texts = texts
        self._numbers = numbers
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()

    @property
    def settings(self) -> dict[str, Any]:
        """The columns."""
        return {"task": self.name, "columns": self.columns}

    def head(self) -> dict[str, Any]:
        """One output for each number."""
        names = dict(enumerate(self._numbers))
        return {
            "num_labels": len(names),
            "id2label": names,
            "label2id": {name: number for number, name in names.items()},
            "problem_type": "regression",
        }

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token, and whether the model knows token types."""
        self._inputs.bind(tokenizer, config)

    def usable(self, rows: Rows) -> Rows:
        """The rows that have a text and finite numbers."""

        def problem_of(index: int) -> Problem:
            for name in self._numbers:
                value = rows.columns[require(rows, name, "data.label")][index]
                if as_number(value) is None:
                    return f"column {name!r} holds {value!r} where a number is expected", "write a number there"
            return self._texts.problem(rows, index)

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Texts to tokens beside their numbers."""
        self.bind(tokenizer)
        rows = self.usable(rows)
        numbers = [[float(value) for value in rows.columns[name]] for name in self._numbers]
        labels = numbers[0] if len(numbers) == 1 else [list(row) for row in zip(*numbers, strict=True)]
        return self._inputs.dataset(self._texts.tokenize(rows, tokenizer, max_length), {"labels": labels})

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """A padded batch; labels are of shape (rows,), or (rows, numbers) where there are several."""
        labels = torch.stack([example["labels"] for example in examples]).float()
        return self._inputs.collate(examples) | {"labels": labels}

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss, MSE, MAE and Pearson's correlation unless others are named."""
        return Metrics(self.loss_kind, names, num_labels=len(self._numbers))

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The text as the model sees it."""
        return self._inputs.text(example, tokenizer)
