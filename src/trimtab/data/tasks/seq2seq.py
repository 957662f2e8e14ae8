"""Sequence to sequence: a source text to a target text (translation, summarization)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Problem, Task
from trimtab.data.tasks.columns import require
from trimtab.data.tasks.decoder_start import DecoderStart
from trimtab.data.tasks.padding import IGNORED, pad, token_mask
from trimtab.data.tasks.texts import column_texts, text_problem
from trimtab.data.tasks.tokenization import tokenize
from trimtab.data.tokens import TokenDataset


class Seq2Seq(Task):
    """Generate the target of a source.

    Args:
        source: The column of the encoder's input.
        target: The column of the text to generate.
        notes, on_bad_rows: As in `Task`.
    """

    name = "seq2seq"
    model_kind = "seq2seq-lm"

    def __init__(self, source: str, target: str, notes: list[str], on_bad_rows: str = "stop") -> None:
        super().__init__({"text": source, "target": target}, notes, on_bad_rows)
        self._source = source
        self._target = target
        self._start = DecoderStart()

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Read the pad token, and from the config the token that the decoder starts with.

        Without a config it is the pad token, as in T5. BART and others start with another token, MBart and PLBart with
        the last token of the target, which is its language code.
        """
        super().bind(tokenizer, config)
        if config is not None:
            self._start = DecoderStart.of(config)

    def problem(self, rows: Rows, index: int) -> Problem:
        """Report a missing source or target."""
        columns = ((self._source, "data.text"), (self._target, "data.target"))
        problems = (text_problem(rows.columns[require(rows, name, key)][index], name) for name, key in columns)
        return next(filter(None, problems), None)

    def encode_rows(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Tokenize sources and targets, each truncated to `max_length`; a row counts as truncated if either is."""
        sources = tokenize(tokenizer, column_texts(rows, self._source), max_length=max_length)
        targets = tokenize(tokenizer, column_texts(rows, self._target), max_length=max_length, as_target=True)
        num_truncated = sum(a or b for a, b in zip(sources.truncated, targets.truncated, strict=True))

        def examples() -> Iterator[dict[str, Any]]:
            for source, target in zip(sources.input_ids, targets.input_ids, strict=True):
                yield {"input_ids": source, "labels": target}

        return TokenDataset.from_examples(examples(), num_truncated=num_truncated)

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Pad encoder inputs and labels; the decoder's input is the labels shifted right."""
        batch = self.collate_inputs(examples)
        mask = token_mask(examples, "labels")
        targets = pad(examples, "labels", self.pad_id, mask)
        batch["decoder_input_ids"] = self._start.shifted(targets, mask, self.pad_id)
        batch["labels"] = pad(examples, "labels", IGNORED, mask)
        return batch

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """Decode source and target, special tokens included."""
        target = tokenizer.decode(example["labels"].tolist(), skip_special_tokens=False)
        return f"{super().example_text(example, tokenizer)} → {target}"
