"""Padded batches of inputs of different lengths, longest first: little padding, and an early memory peak."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from trimtab.errors import RecipeError

Example = dict[str, Sequence[int]]


def padded_batches(
    examples: Sequence[Example], batch_size: int, tokenizer: Any, device: torch.device, *, side: str = "right"
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Group examples by length and pad each batch to its longest example.

    Args:
        examples: Tokenized inputs: `input_ids`, and other fields with one number per token.
        batch_size: Maximum number of examples per batch.
        tokenizer: The tokenizer, for its pad token.
        device: Device of the batches.
        side: "right", or "left" for decoders that generate after the last token.

    Yields:
        The indices of the examples of a batch, and the batch with its attention mask.
    """
    if batch_size < 1:
        raise RecipeError(f"batch_size is {batch_size}", "use 1 or more")
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index]["input_ids"]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        chosen = [examples[index] for index in indices]
        values = {"attention_mask": [[1] * len(example["input_ids"]) for example in chosen]}
        values |= {name: [list(example[name]) for example in chosen] for name in chosen[0]}
        batch = {}
        for name, rows in values.items():
            fill = tokenizer.pad_token_id if name == "input_ids" else 0
            tensors = [torch.tensor(row) for row in rows]
            padded = pad_sequence(tensors, batch_first=True, padding_value=fill, padding_side=side)
            batch[name] = padded.to(device)
        yield indices, batch
