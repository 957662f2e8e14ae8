"""Find the largest batch of a user's DataLoader without iterating it.

Rows are read from its dataset and collated by its `collate_fn`. Its sampler is not used, and the state of every random
generator involved is restored, so the loop gets the same batches as without this.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.randomness import preserve_host_random_state

_MOST_ROWS_READ = 512
_TOKENS = "input_ids"


class NoBatch(Exception):
    """The largest batch cannot be determined in advance; the message is the reason."""


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of a loader, as inputs of the model.

    Attributes:
        inputs: The batch, with tensors on meta.
        rows: Number of rows.
        length: Tokens per row, including padding; None if rows have no length.
        is_padded: Whether some batches contain padding.
        origin: Description of the rows, for messages.
    """

    inputs: dict[str, Any]
    rows: int
    length: int | None
    is_padded: bool
    origin: str

    def resized(self, *, rows: int | None = None, length: int | None = None) -> "LargestBatch":
        """The same batch with fewer or shorter rows."""
        new_rows, new_length = rows or self.rows, length or self.length

        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or not value.dim():
                return value
            shape = [new_rows if value.shape[0] == self.rows else value.shape[0], *value.shape[1:]]
            if len(shape) > 1 and shape[1] == self.length and new_length is not None:
                shape[1] = new_length
            return torch.empty(shape, dtype=value.dtype, device="meta")

        inputs = {name: of(value) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, rows=new_rows, length=new_length)

    def __str__(self) -> str:
        of = "" if self.length is None else f" of {self.length} tokens"
        return f"{self.rows} row{'s' if self.rows != 1 else ''}{of}: {self.origin}"


def largest_batch(loader: DataLoader[Any], num_parts: int = 1) -> LargestBatch:
    """Build the batch with the largest rows of a loader, from a sample of at most 512 rows.

    Args:
        loader: The loader; it is not changed.
        num_parts: Number of processes that share a batch.

    Raises:
        NoBatch: The largest batch cannot be determined, or is not a mapping of the model's inputs.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise NoBatch("the loader reads a stream, whose rows are not known in advance")
    with preserve_host_random_state():
        dataset, collate = _with_own_generators(dataset), _with_own_generators(loader.collate_fn)
        if loader.batch_sampler is None:  # rows are read one by one, or the dataset makes batches
            return _seen(collate(dataset[0]), 1, None, "the first of the dataset")
        size = getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            raise NoBatch(f"the loader's {type(loader.batch_sampler).__name__} has no batch_size")
        total = len(dataset)
        if not total:
            raise NoBatch("the loader has no rows")
        count = min(-(-size // num_parts), total)
        num_read = min(total, max(_MOST_ROWS_READ, count))
        rows = _read(dataset, [index * total // num_read for index in range(num_read)])
        sizes = [_sizes_of(row) for row in rows]
        chosen = _largest(sizes, count)
        batch = collate([rows[index] for index in chosen])
    if not any(sizes):
        return _seen(batch, count, None, f"the first of {total:,}")
    of_all = f"all {total:,}" if num_read == total else f"a sample of {num_read:,} of {total:,}"
    is_uneven = count > 1 and any(size != sizes[0] for size in sizes)
    word = "longest" if _TOKENS in sizes[0] else "largest"
    return _seen(batch, count, is_uneven, f"the {word} of {of_all}")


def _read(dataset: Any, indices: list[int]) -> list[Any]:
    if hasattr(dataset, "__getitems__"):  # in the same way as DataLoader
        return list(dataset.__getitems__(indices))
    return [dataset[index] for index in indices]


def _with_own_generators(thing: Any) -> Any:
    """Return a shallow copy with copies of its random generators, or the object itself if it has none."""
    held = getattr(thing, "__dict__", None)
    if not held or isinstance(thing, type | FunctionType):
        return thing
    copies = {name: _copied(value) for name, value in held.items() if _is_generator(value)}
    if not copies and not hasattr(thing, "seed"):  # with a seed, some collators create a generator in their first call
        return thing
    other = copy.copy(thing)
    other.__dict__.update(copies)
    return other


def _is_generator(value: Any) -> bool:
    is_numpys = type(value).__module__.startswith("numpy.random")
    return is_numpys or isinstance(value, torch.Generator | random.Random)


def _copied(generator: Any) -> Any:
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def _sizes_of(row: Any) -> dict[Any, int]:
    """Return the size of every field of a row that is a sequence or an array: tokens, or numbers of an image."""
    if isinstance(row, Mapping):
        fields = list(row.items())
    elif isinstance(row, list | tuple):
        fields = list(enumerate(row))
    else:
        return {}
    return {name: _size_of(value) for name, value in fields if _is_sequence(value)}


def _is_sequence(value: Any) -> bool:
    if hasattr(value, "shape"):
        return len(value.shape) > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _size_of(value: Any) -> int:
    # the first dimension of an image is its colour channels, that of a spectrogram its frequencies
    return math.prod(value.shape) if hasattr(value, "shape") else len(value)


def _largest(sizes: Sequence[dict[Any, int]], count: int) -> list[int]:
    """Positions of the largest rows, including the largest of every field, because batches are padded to it."""
    names = list(dict.fromkeys(name for row in sizes for name in row))
    if not names:
        return list(range(count))
    first = _TOKENS if _TOKENS in names else names[0]
    order = sorted(range(len(sizes)), key=lambda index: -sizes[index].get(first, 0))
    needed = [max(order, key=lambda index: sizes[index].get(name, 0)) for name in names]
    return list(dict.fromkeys([order[0], *needed, *order]))[:count]


def _seen(batch: Any, rows: int, is_uneven: bool | None, origin: str) -> LargestBatch:
    if not isinstance(batch, Mapping) and not hasattr(batch, "items"):
        raise NoBatch(
            f"the loader returns batches of type {type(batch).__name__}, without the names of the model's inputs;"
            " use a collate_fn that returns a dict"
        )
    values = dict(batch.items())
    mask = values.get("attention_mask")
    has_padding = isinstance(mask, torch.Tensor) and bool((mask == 0).any())
    tokens = values.get(_TOKENS)
    length = int(tokens.shape[1]) if isinstance(tokens, torch.Tensor) and tokens.dim() > 1 else None
    # for rows without tokens: images or sounds
    arrays = [tokens, *values.values()]
    first = next((value for value in arrays if isinstance(value, torch.Tensor) and value.dim()), None)
    if first is not None:
        rows = int(first.shape[0])
    inputs = {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    return LargestBatch(inputs, rows, length, has_padding or bool(is_uneven), origin)
