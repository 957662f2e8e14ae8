"""Inputs of different lengths as padded batches: the longest first, so that little is padded and memory peaks early."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError

Tokens = dict[str, Sequence[int]]


def padded_batches(
    examples: Sequence[Tokens], batch_size: int, tokenizer: Any, device: torch.device, *, side: str = "right"
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Group examples by length and pad each batch to its own longest.

    Args:
        examples: Tokenized inputs: `input_ids`, and what else has one number for each token.
        batch_size: The most examples of a batch.
        tokenizer: Says what to pad with.
        device: Where the batches go.
        side: "right", or "left" for models that go on writing at the end.

    Yields:
        The indices of the examples of a batch, and the batch with its attention mask.
    """
    if batch_size < 1:
        raise RecipeError(f"batch_size {batch_size} is not possible", "use 1 or more")
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index]["input_ids"]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        chosen = [examples[index] for index in indices]
        width = len(chosen[0]["input_ids"])
        ones = [[1] * len(example["input_ids"]) for example in chosen]
        batch = {"attention_mask": _padded(ones, width, 0, side)}
        for name in chosen[0]:
            fill = tokenizer.pad_token_id if name == "input_ids" else 0
            batch[name] = _padded([example[name] for example in chosen], width, fill, side)
        yield indices, {name: values.to(device) for name, values in batch.items()}


def _padded(rows: Sequence[Sequence[int]], width: int, fill: int, side: str) -> torch.Tensor:
    padded = torch.full((len(rows), width), fill)
    for row, values in zip(padded, rows, strict=True):
        place = row[width - len(values) :] if side == "left" else row[: len(values)]
        place.copy_(torch.tensor(values))
    return padded
