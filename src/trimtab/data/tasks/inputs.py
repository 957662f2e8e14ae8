"""What goes into an encoder: token ids, token types of pairs, the attention mask. Shared by tasks on whole texts."""

from typing import Any

from torch import Tensor

from trimtab.data.tasks.base import Batch
from trimtab.data.tasks.padding import pad, pad_token_id, token_mask
from trimtab.data.tasks.tokenizing import Tokenized
from trimtab.data.tokens import TokenDataset
from trimtab.errors import DataError


class EncoderInputs:
    """Builds the inputs of an encoder from tokens; knows the pad token once it is bound."""

    def __init__(self) -> None:
        self._pad_id: int | None = None
        self._uses_types = True

    @property
    def pad_id(self) -> int:
        """The id that fills up rows.

        Raises:
            DataError: Before `bind`.
        """
        if self._pad_id is None:
            raise DataError("the task does not know its tokenizer yet", "call task.bind(tokenizer) before collate")
        return self._pad_id

    def bind(self, tokenizer: Any, config: Any = None) -> None:
        """Take the pad token; with the model's config, whether it has embeddings for token types."""
        self._pad_id = pad_token_id(tokenizer)
        if config is not None:
            # A decoder refuses token types, or takes them for tokens (GPT-2); RoBERTa has room for type 0 only.
            self._uses_types = (getattr(config, "type_vocab_size", None) or 0) > 1

    def dataset(self, tokenized: Tokenized, fields: dict[str, list[Any]]) -> TokenDataset:
        """Tokens and what belongs to each row as one dataset."""
        columns: dict[str, list[Any]] = {"input_ids": tokenized.input_ids, **fields}
        if tokenized.token_type_ids is not None:
            columns["token_type_ids"] = tokenized.token_type_ids
        rows = zip(*columns.values(), strict=True)
        examples = (dict(zip(columns, row, strict=True)) for row in rows)
        return TokenDataset.from_examples(examples, num_truncated=tokenized.num_truncated)

    def collate(self, examples: list[dict[str, Tensor]]) -> Batch:
        """Padded token ids, their attention mask, and token types where the model uses them."""
        mask = token_mask(examples)
        batch = {"input_ids": pad(examples, "input_ids", self.pad_id, mask), "attention_mask": mask.long()}
        if self._uses_types and "token_type_ids" in examples[0]:
            batch["token_type_ids"] = pad(examples, "token_type_ids", 0, mask)
        return batch

    def text(self, example: dict[str, Tensor], tokenizer: Any) -> str:
        """The tokens of an example decoded, special ones included."""
        return str(tokenizer.decode(example["input_ids"].tolist(), skip_special_tokens=False))
