"""Masked language modelling: some tokens are replaced, and the model predicts the originals.

Which tokens are replaced is a pure function of (seed, epoch, row, position): it does not depend on the batch, the
worker or the rank that a row belongs to, and it changes with every epoch.
"""

from typing import Any

import torch
from torch import Tensor

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.decoder_start import DecoderStart
from trimtab.data.tasks.padding import IGNORED
from trimtab.data.tasks.texts import TextColumns, column_texts
from trimtab.data.tasks.tokenization import tokenize_in_pieces
from trimtab.data.tokens import TokenDataset
from trimtab.errors import ModelError

# BERT's: 15% of the tokens are labels; of these 80% become the mask token, 10% a random token, 10% stay.
_LABELLED, _MASKED, _MASKED_OR_RANDOM = 0.15, 0.8, 0.9


class MaskedLM(Task):
    """Predict masked tokens from their context.

    Args:
        texts: The text column.
        seed: Decides which tokens are masked.
        notes, on_bad_rows: As in `Task`.
    """

    name = "masked-lm"
    model_kind = "masked-lm"

    def __init__(self, texts: TextColumns, notes: list[str], seed: int = 0, on_bad_rows: str = "stop") -> None:
        super().__init__({"text": texts.as_role}, notes, on_bad_rows)
        self._texts = texts
        self._seed = seed
        self._mask_id = -1
        self._decoder_start: DecoderStart | None = None
        self._is_special = torch.empty(0, dtype=torch.bool)
        self._plain_ids = torch.empty(0, dtype=torch.long)

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Read the pad and mask tokens, and the special tokens, which are never masked.

        Raises:
            ModelError: If the tokenizer has no mask token.
        """
        if tokenizer.mask_token_id is None:
            raise ModelError("the tokenizer has no mask token", "use an encoder such as BERT, or set task: causal-lm")
        super().bind(tokenizer, config)
        if config is not None:
            self._decoder_start = DecoderStart.of(config) if getattr(config, "is_encoder_decoder", False) else None
        self._mask_id = int(tokenizer.mask_token_id)
        self._is_special = torch.zeros(len(tokenizer), dtype=torch.bool)
        self._is_special[torch.tensor(tokenizer.all_special_ids)] = True
        self._plain_ids = (~self._is_special).nonzero().flatten()

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing text."""
        return self._texts.problem(rows, index)

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize texts; a long text becomes several examples, each with its special tokens. Nothing is truncated."""
        pieces = tokenize_in_pieces(tokenizer, column_texts(rows, self._texts.names[0]), max_length)
        return TokenDataset.from_examples({"input_ids": ids} for ids in pieces)

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad a batch and mask it; labels are the original tokens at the chosen positions.

        A decoder, if the model has one, reads all original tokens shifted right, as in the pretraining of BART.
        """
        batch = self.collate_inputs(examples)
        ids = batch["input_ids"]
        rows = torch.tensor([int(example["row"]) for example in examples])
        positions = torch.arange(ids.shape[1])
        choice, kind, other = (uniform(self._seed, epoch, rows, positions, draw) for draw in range(3))
        chosen = (choice < _LABELLED) & batch["attention_mask"].bool() & ~self._is_special[ids]
        batch["labels"] = torch.where(chosen, ids, IGNORED)
        if self._decoder_start is not None:
            mask = batch["attention_mask"].bool()
            batch["decoder_input_ids"] = self._decoder_start.shifted(ids, mask, self.pad_id)
        random_ids = self._plain_ids[(other * len(self._plain_ids)).long()]
        masked = torch.where(kind < _MASKED, self._mask_id, torch.where(kind < _MASKED_OR_RANDOM, random_ids, ids))
        batch["input_ids"] = torch.where(chosen, masked, ids)
        return batch


def uniform(seed: int, epoch: int, rows: Tensor, positions: Tensor, draw: int) -> Tensor:
    """Return numbers in [0, 1) of shape [rows, positions], each a pure function of all arguments.

    Every argument passes through the finalizer of splitmix64 as a counter. There is no generator state, so padding,
    batch order and worker processes do not change the numbers.
    """
    base = _mix(_mix(_mix(torch.tensor(seed)) + epoch) + draw)
    mixed = _mix(_mix(base + rows)[:, None] + positions)
    return ((mixed >> 11) & (2**53 - 1)).double() / 2**53


def _mix(x: Tensor) -> Tensor:
    """Apply the finalizer of splitmix64 to int64 values; products wrap around."""
    x = x + _as_int64(0x9E3779B97F4A7C15)
    x = (x ^ _shift_right(x, 30)) * _as_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _as_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own operator extends the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _as_int64(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant
