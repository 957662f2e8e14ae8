"""Causal language modelling: all texts as one token stream, each ended by EOS, split into blocks of equal length."""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.padding import IGNORED
from trimtab.data.tasks.texts import TextColumns, column_texts
from trimtab.data.tasks.tokenization import ROWS_PER_CALL, tokenize
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError
from trimtab.log import log_info_once


class CausalLM(Task):
    """Predict the next token of texts.

    Args:
        texts: The text column.
        notes, on_bad_rows: As in `Task`.
    """

    name = "causal-lm"
    model_kind = "causal-lm"
    shifts_labels = True

    def __init__(self, texts: TextColumns, notes: list[str], on_bad_rows: str = "stop") -> None:
        super().__init__({"text": texts.as_role}, notes, on_bad_rows)
        self._texts = texts

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing text."""
        return self._texts.problem(rows, index)

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize all texts to blocks of `max_length` tokens; the last block is shorter, and no text is truncated.

        Raises:
            DataError: If there are fewer than two tokens, or blocks would have fewer.
        """
        if max_length < 2:
            raise DataError(f"data.max_length is {max_length}", "set data.max_length to 2 or more")
        stream = token_stream(column_texts(rows, self._texts.names[0]), tokenizer)
        if len(stream) < 2:
            raise DataError(f"{rows.origin} has {len(stream)} token(s): there is nothing to predict", "add more text")
        starts = range(0, len(stream), max_length)
        if len(stream) - starts[-1] == 1:  # a block of one token has no next token to predict
            stream.pop()
            starts = starts[:-1]
        offsets = array("q", [*starts, len(stream)])
        return TokenDataset({"input_ids": torch.frombuffer(stream, dtype=torch.int32).clone()}, {"input_ids": offsets})

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad a batch. Every token is a label, padding is not."""
        batch = self.collate_inputs(examples)
        # By the attention mask and not by the pad token, which may be EOS: the model has to learn EOS.
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch


def token_stream(texts: Sequence[str], tokenizer: Any) -> "array[int]":
    """Concatenate the tokens of all texts, each with the tokenizer's special tokens and EOS at its end.

    SEP replaces EOS if the tokenizer has no EOS. If it has neither, texts follow each other without a separator.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        log_info_once("the tokenizer has no EOS token: texts are concatenated without a separator")
    stream = array("i")
    for start in range(0, len(texts), ROWS_PER_CALL):
        for ids in tokenize(tokenizer, texts[start : start + ROWS_PER_CALL], max_length=None).input_ids:
            stream.extend(ids)
            if end is not None and (not ids or ids[-1] != end):
                stream.append(end)
    return stream
