"""Causal language modelling: all texts as one stream of tokens, each ended by EOS, cut to blocks of one length."""

from array import array
from collections.abc import Sequence
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
from trimtab.data.tasks.tokenizing import ROWS_PER_CALL, tokenize
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError
from trimtab.log import say_once


class CausalLM:
    """Learn to continue texts.

    Args:
        column: The column of the text.
        said: Lines for the user about what was guessed.
        block_length: Tokens in a block; by default the `max_length` given to `encode`.
        on_bad_rows: "stop" or "skip".
    """

    name = "causal-lm"
    model_kind = "causal-lm"
    loss_kind = "token-cross-entropy"
    shifts_labels = True
    default_metric = "loss"

    def __init__(
        self, column: str, said: list[str], block_length: int | None = None, on_bad_rows: str = "stop"
    ) -> None:
        self.columns: Columns = {"text": column}
        self.said = said
        self._column = column
        self._block_length = block_length
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()

    @property
    def settings(self) -> dict[str, Any]:
        """Column and length of a block."""
        return {"task": self.name, "columns": self.columns, "block_length": self._block_length}

    def head(self) -> dict[str, Any]:
        """Nothing: a language model brings its head along."""
        return {}

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token."""
        self._inputs.bind(tokenizer, config)

    def usable(self, rows: Rows) -> Rows:
        """The rows that have a text."""
        values = rows.columns[require(rows, self._column, "data.text")]

        def problem_of(index: int) -> Problem:
            return text_problem(values[index], self._column)

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Texts to blocks. The last block is shorter, so that nothing is lost; no text is cut off.

        Raises:
            DataError: If there is too little text to predict a token, or a block is longer than `max_length`.
        """
        self.bind(tokenizer)
        block_length = self._block_length or max_length
        if not 2 <= block_length <= max_length:
            raise DataError(f"blocks of {block_length} tokens", f"choose a block length between 2 and {max_length}")
        stream = token_stream(column_texts(self.usable(rows), self._column), tokenizer)
        if len(stream) < 2:
            raise DataError(
                f"{rows.origin} holds {len(stream)} token(s): there is nothing to predict", "give more text"
            )
        starts = range(0, len(stream), block_length)
        if len(stream) - starts[-1] == 1:  # a block of one token has nothing to predict
            stream.pop()
            starts = starts[:-1]
        offsets = array("q", [*starts, len(stream)])
        return TokenDataset({"input_ids": torch.frombuffer(stream, dtype=torch.int32).clone()}, {"input_ids": offsets})

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """A batch in which every token but padding is a label."""
        batch = self._inputs.collate(examples)
        # Not where the pad token stands: it may be EOS, which has to be learnt.
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, IGNORED)
        return batch

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss and perplexity unless others are named."""
        return Metrics(self.loss_kind, names, shifts_labels=True)

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The block as the model sees it."""
        return self._inputs.text(example, tokenizer)


def token_stream(texts: Sequence[str], tokenizer: Any) -> "array[int]":
    """All texts one after the other, each with the special tokens that the tokenizer adds and EOS at its end.

    A tokenizer without EOS may have SEP, which then ends a text; if it has neither, texts follow each other directly.
    """
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
    if end is None:
        say_once("the tokenizer has no EOS token: texts follow each other without a mark between them")
    stream = array("i")
    for start in range(0, len(texts), ROWS_PER_CALL):
        for ids in tokenize(tokenizer, texts[start : start + ROWS_PER_CALL], max_length=None).input_ids:
            stream.extend(ids)
            if end is not None and (not ids or ids[-1] != end):
                stream.append(end)
    return stream
