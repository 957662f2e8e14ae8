"""Masked language modelling: some tokens are hidden, and the model learns to name them.

What is hidden is a pure function of (seed, epoch, row, position): the same whatever batch, worker or process a row
comes to, and another one in every epoch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Columns, Problem, without_bad_rows
from trimtab.data.tasks.columns import require
from trimtab.data.tasks.inputs import EncoderInputs
from trimtab.data.tasks.padding import IGNORED
from trimtab.data.tasks.texts import column_texts, text_problem
from trimtab.data.tasks.tokenizing import tokenize_in_pieces
from trimtab.data.tokens import TokenDataset
from trimtab.errors import ModelError


class MaskedLM:
    """Learn hidden tokens from what stands around them.

    Args:
        column: The column of the text.
        said: Lines for the user about what was guessed.
        mask_share: The share of tokens that carry loss; of these 80% become the mask token, 10% another token, and
            10% stay.
        seed: Chooses what is hidden.
        on_bad_rows: "stop" or "skip".
    """

    name = "masked-lm"
    model_kind = "masked-lm"
    loss_kind = "token-cross-entropy"
    shifts_labels = False
    default_metric = "loss"

    def __init__(
        self, column: str, said: list[str], mask_share: float = 0.15, seed: int = 0, on_bad_rows: str = "stop"
    ) -> None:
        self.columns: Columns = {"text": column}
        self.said = said
        self._column = column
        self._mask_share = mask_share
        self._seed = seed
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()
        self._mask_id = -1
        self._is_special = torch.empty(0, dtype=torch.bool)
        self._plain_ids = torch.empty(0, dtype=torch.long)

    @property
    def settings(self) -> dict[str, Any]:
        """The column; masking happens later, in `collate`."""
        return {"task": self.name, "columns": self.columns}

    def head(self) -> dict[str, Any]:
        """Nothing: the model brings its head along."""
        return {}

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad and mask tokens, and which tokens are never hidden.

        Raises:
            ModelError: If the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ModelError("the tokenizer has no mask token", "choose an encoder such as BERT, or task: causal-lm")
        self._inputs.bind(tokenizer, config)
        self._mask_id = int(tokenizer.mask_token_id)
        self._is_special = torch.zeros(len(tokenizer), dtype=torch.bool)
        self._is_special[torch.tensor(tokenizer.all_special_ids)] = True
        self._plain_ids = (~self._is_special).nonzero().flatten()

    def usable(self, rows: Rows) -> Rows:
        """The rows that have a text."""
        values = rows.columns[require(rows, self._column, "data.text")]

        def problem_of(index: int) -> Problem:
            return text_problem(values[index], self._column)

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Texts to tokens; a long text becomes several examples, each with its special tokens, so nothing is cut."""
        self.bind(tokenizer)
        texts = column_texts(self.usable(rows), self._column)

        def examples() -> Iterator[dict[str, Any]]:
            yield from ({"input_ids": ids} for ids in tokenize_in_pieces(tokenizer, texts, max_length))

        return TokenDataset.from_examples(examples())

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """A padded batch with hidden tokens; labels are the tokens that were chosen."""
        batch = self._inputs.collate(examples)
        ids = batch["input_ids"]
        rows = torch.tensor([int(example["row"]) for example in examples])
        positions = torch.arange(ids.shape[1])
        choice, kind, other = (uniform(self._seed, epoch, rows, positions, draw) for draw in range(3))
        chosen = (choice < self._mask_share) & batch["attention_mask"].bool() & ~self._is_special[ids]
        batch["labels"] = torch.where(chosen, ids, IGNORED)
        random_ids = self._plain_ids[(other * len(self._plain_ids)).long()]
        hidden = torch.where(kind < 0.8, self._mask_id, torch.where(kind < 0.9, random_ids, ids))
        batch["input_ids"] = torch.where(chosen, hidden, ids)
        return batch

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss and perplexity unless others are named."""
        return Metrics(self.loss_kind, names)

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The text before anything is hidden."""
        return self._inputs.text(example, tokenizer)


def uniform(seed: int, epoch: int, rows: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Numbers in [0, 1) for every row and position, each a pure function of all arguments.

    A counter goes through a mixing function (the finalizer of splitmix64) once for each argument: there is no state,
    so padding, batch order and worker processes change nothing.
    """
    base = _mixed(_mixed(_mixed(torch.tensor(seed)) + epoch) + draw)
    mixed = _mixed(_mixed(base + rows)[:, None] + positions)
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53


def _mixed(x: Tensor) -> Tensor:
    """Bits of int64 values well stirred; products wrap around."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A shift to the right that fills with zeros; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
