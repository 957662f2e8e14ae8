"""Sequence to sequence: one text in, another out (translation, summaries)."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from trimtab.data.metrics import Metrics
from trimtab.data.rows import Rows
from trimtab.data.tasks.base import Batch, Columns, Problem, without_bad_rows
from trimtab.data.tasks.columns import require
from trimtab.data.tasks.decoder_start import shifted_right, starts_with_last_token
from trimtab.data.tasks.inputs import EncoderInputs
from trimtab.data.tasks.padding import IGNORED, pad, token_mask
from trimtab.data.tasks.texts import column_texts, text_problem
from trimtab.data.tasks.tokenizing import tokenize
from trimtab.data.tokens import TokenDataset


class Seq2Seq:
    """Learn to write the target of a source.

    Args:
        source: The column that is read.
        target: The column that is to be written.
        said: Lines for the user about what was guessed.
        on_bad_rows: "stop" or "skip".
    """

    name = "seq2seq"
    model_kind = "seq2seq-lm"
    loss_kind = "token-cross-entropy"
    shifts_labels = False
    default_metric = "loss"

    def __init__(self, source: str, target: str, said: list[str], on_bad_rows: str = "stop") -> None:
        self.columns: Columns = {"text": source, "target": target}
        self.said = said
        self._source = source
        self._target = target
        self._on_bad_rows = on_bad_rows
        self._inputs = EncoderInputs()
        self._start_id: int | None = None
        self._starts_with_last_token = False

    @property
    def settings(self) -> dict[str, Any]:
        """The columns."""
        return {"task": self.name, "columns": self.columns}

    def head(self) -> dict[str, Any]:
        """Nothing: the model brings its head along."""
        return {}

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token, and from the config the token with which the decoder starts.

        Without a config it is the pad token, as in T5; BART and others start with another one, MBart and PLBart with
        the last token of the target, which names its language.
        """
        self._inputs.bind(tokenizer, config)
        if config is not None:
            self._starts_with_last_token = starts_with_last_token(getattr(config, "model_type", None))
        start_id = getattr(config, "decoder_start_token_id", None)
        if start_id is not None:
            self._start_id = int(start_id)

    def usable(self, rows: Rows) -> Rows:
        """The rows that have a source and a target."""
        sources = rows.columns[require(rows, self._source, "data.text")]
        targets = rows.columns[require(rows, self._target, "data.target")]

        def problem_of(index: int) -> Problem:
            return text_problem(sources[index], self._source) or text_problem(targets[index], self._target)

        return without_bad_rows(rows, problem_of, self._on_bad_rows)

    def encode(self, rows: Rows, tokenizer: Any, max_length: int) -> TokenDataset:
        """Sources and targets to tokens, each cut at `max_length`; a row of which either is cut counts as truncated."""
        self.bind(tokenizer)
        rows = self.usable(rows)
        sources = tokenize(tokenizer, column_texts(rows, self._source), max_length=max_length)
        targets = tokenize(tokenizer, column_texts(rows, self._target), max_length=max_length, as_target=True)
        cut = [a or b for a, b in zip(sources.truncated, targets.truncated, strict=True)]

        def examples() -> Iterator[dict[str, Any]]:
            for source, target in zip(sources.input_ids, targets.input_ids, strict=True):
                yield {"input_ids": source, "labels": target}

        return TokenDataset.from_examples(examples(), num_truncated=sum(cut))

    def collate(self, examples: list[dict[str, Tensor]], epoch: int = 0) -> Batch:
        """Encoder inputs, labels, and the labels shifted right as what the decoder reads."""
        batch = self._inputs.collate(examples)
        mask = token_mask(examples, "labels")
        pad_id = self._inputs.pad_id
        read = pad(examples, "labels", pad_id, mask)
        start_id = None if self._starts_with_last_token else pad_id if self._start_id is None else self._start_id
        batch["decoder_input_ids"] = shifted_right(read, mask, start_id)
        batch["labels"] = pad(examples, "labels", IGNORED, mask)
        return batch

    def metrics(self, names: Sequence[str] | None = None) -> Metrics:
        """Loss and perplexity unless others are named."""
        return Metrics(self.loss_kind, names)

    def example_text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """Source and target as the model sees them."""
        target = tokenizer.decode(example["labels"].tolist(), skip_special_tokens=False)
        return f"{self._inputs.text(example, tokenizer)} → {target}"
