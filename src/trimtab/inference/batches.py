"""Inputs of different lengths as padded batches: the longest first, so that little is padded and memory peaks early."""

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch

Tokens = dict[str, list[int]]


def padded_batches(
    examples: Sequence[Tokens], batch_size: int, tokenizer: Any, model: Any, *, side: str = "right"
) -> Iterator[tuple[list[int], dict[str, torch.Tensor]]]:
    """Group examples by length and pad each batch to its own longest.

    Args:
        examples: Tokenized inputs; only what the model's forward takes is passed on.
        batch_size: The most examples of a batch.
        tokenizer: Says what to pad with.
        model: The model, which says where to.
        side: "right", or "left" for models that go on writing at the end.

    Yields:
        The indices of the examples of a batch, and the batch.
    """
    taken = inspect.signature(model.forward).parameters
    fill = {"input_ids": tokenizer.pad_token_id, "token_type_ids": getattr(tokenizer, "pad_token_type_id", 0)}
    order = sorted(range(len(examples)), key=lambda index: -len(examples[index]["input_ids"]))
    for start in range(0, len(order), batch_size):
        indices = order[start : start + batch_size]
        width = len(examples[indices[0]]["input_ids"])
        batch = {}
        for name in examples[indices[0]]:
            if name in taken:
                rows = [_padded(examples[index][name], width, fill.get(name, 0), side) for index in indices]
                batch[name] = torch.tensor(rows, device=model.device)
        yield indices, batch


def _padded(values: list[int], width: int, fill: int, side: str) -> list[int]:
    padding = [fill] * (width - len(values))
    return padding + values if side == "left" else values + padding
