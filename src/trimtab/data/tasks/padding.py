"""Ragged examples to padded batches: one allocation a field, masks from lengths and never from the pad token.

A pad token may be a real token as well (GPT-2 and Llama pad with EOS), so what is padding is known by position.
"""

from typing import Any

import torch
from torch import Tensor

from trimtab.errors import ModelError

IGNORED = -100  # labels that carry no loss, as everywhere in torch and transformers


def token_mask(examples: list[dict[str, Tensor]], field: str = "input_ids") -> Tensor:
    """True where a token of the field stands, False where padding does: rows on the left, filled up on the right."""
    lengths = torch.tensor([example[field].numel() for example in examples])
    return torch.arange(int(lengths.max())) < lengths[:, None]


def pad(examples: list[dict[str, Tensor]], field: str, value: int, mask: Tensor | None = None) -> Tensor:
    """One ragged field of all examples, padded to the longest, as int64.

    All rows are written at once; a copy for each row took three times as long.

    Args:
        examples: What is to be padded.
        field: A field of theirs.
        value: What fills up the rows.
        mask: The `token_mask` of the field, where it is known already.
    """
    mask = token_mask(examples, field) if mask is None else mask
    padded = torch.full(mask.shape, value)
    return padded.masked_scatter_(mask, torch.cat([example[field] for example in examples]).long())


def pad_token_id(tokenizer: Any) -> int:
    """The id that fills up rows: the pad token, or EOS where there is none.

    Raises:
        ModelError: If the tokenizer has neither.
    """
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    raise ModelError("the tokenizer has neither a pad token nor an EOS token", "set tokenizer.pad_token")
