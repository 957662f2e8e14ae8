"""Rows of sources without a length, such as generators and `IterableDataset`: no more of them than a run needs."""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.errors import DataError
from trimtab.hardware.memory import free_host_memory
from trimtab.log import say
from trimtab.units import format_bytes

_REPORTED_BYTES = 2**30
_MAX_BYTES = 8 * 2**30


@dataclass(frozen=True)
class StreamNeed:
    """How much of a stream a run needs.

    Attributes:
        num_rows: Number of rows.
        num_characters: For rows that consist of one text: read on until they have this many characters, because texts
            are concatenated for causal-lm.
        reason: The setting that both follow from.
    """

    num_rows: int
    num_characters: int = 0
    reason: str = ""


def read_stream(items: Iterable[Any], need: StreamNeed | None, origin: str) -> Iterator[Any]:
    """Yield items of a source without a length: as many as a run needs, without a need all of them.

    Args:
        items: The source.
        need: The number of rows that the run needs; None if it is unknown.
        origin: The source, for messages.

    Raises:
        DataError: The items take more memory than rows may take.
    """
    limit = min(_MAX_BYTES, free_host_memory() // 2)
    num_bytes, num_characters, reported = 0, 0, False
    for number, item in enumerate(items, 1):
        yield item
        num_bytes += _size(item)
        text = _only_text(item) if need and need.num_characters else None
        num_characters += len(text or "")
        if need and number >= need.num_rows and (text is None or num_characters >= need.num_characters):
            say(f"{origin} have no length: the first {number:,} are read, enough for {need.reason}")
            return
        if num_bytes > limit:
            raise DataError(
                f"{origin} have no length, and no end in sight: {number:,} take {format_bytes(num_bytes)} of memory",
                "pass a part of them, such as dataset.take(100_000); with train.max_steps, only the rows that these "
                "steps need are read from data.train",
            )
        if num_bytes > _REPORTED_BYTES and not reported:
            reported = True
            say(f"{origin} have no length: {number:,} ({format_bytes(num_bytes)}) are in memory, and reading goes on")


def _only_text(item: Any) -> str | None:
    """The text of a row that consists of one text, else None."""
    values = list(item.values()) if isinstance(item, dict) else [item]
    return values[0] if len(values) == 1 and isinstance(values[0], str) else None


def _size(value: Any) -> int:
    """The bytes of a value in memory, with everything in it."""
    inner = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    parts = sum(map(_size, inner)) if isinstance(inner, list | tuple) else 0
    return sys.getsizeof(value) + parts
