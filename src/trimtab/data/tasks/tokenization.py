"""Convert texts to token ids, in calls of bounded size: a fast tokenizer works in parallel within a call."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from trimtab.errors import DataError

Item = TypeVar("Item")

ROWS_PER_CALL = 1000
CHARACTERS_PER_CALL = 4_000_000  # takes about 640 MB inside a fast tokenizer
_CALL_SETTINGS = {"return_attention_mask": False, "verbose": False}


@dataclass(frozen=True)
class Tokenized:
    """Token ids of many texts.

    Args:
        input_ids: One array per text.
        token_type_ids: For pairs, if the tokenizer distinguishes first and second text; else None, since all zeros are
            what a model assumes without them.
        truncated: For each text whether it was truncated.
    """

    input_ids: list["array[int]"]
    token_type_ids: list["array[int]"] | None
    truncated: list[bool]

    @property
    def num_truncated(self) -> int:
        """Number of truncated texts."""
        return sum(self.truncated)


@contextmanager
def backend_unchanged(tokenizer: Any) -> Iterator[None]:
    """Restore truncation and padding of a fast tokenizer on exit.

    Every call leaves its own settings in the backend, and `save_pretrained` would write them into tokenizer.json.
    """
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "no_truncation"):  # a slow tokenizer keeps no settings
        yield
        return
    truncation, padding = backend.truncation, backend.padding
    try:
        yield
    finally:
        backend.enable_truncation(**truncation) if truncation else backend.no_truncation()
        backend.enable_padding(**padding) if padding else backend.no_padding()


def tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int | None,
    as_target: bool = False,
) -> Tokenized:
    """Tokenize texts, or pairs of texts, with the special tokens that the tokenizer adds.

    Args:
        tokenizer: A tokenizer of transformers.
        texts: The texts, or the first texts of pairs.
        pairs: The second texts.
        max_length: Truncate to this number of tokens, including special tokens; in a pair, the longer text is
            truncated. None truncates nothing.
        as_target: Whether to tokenize as targets of a sequence-to-sequence model.

    Raises:
        DataError: If `max_length` leaves no room for text besides the special tokens.
    """
    settings: dict[str, Any] = dict(_CALL_SETTINGS)
    if max_length is not None:
        _room_for_text(tokenizer, max_length, pair=pairs is not None)
        settings |= {"truncation": True, "max_length": max_length}
    input_ids: list[array[int]] = []
    token_type_ids: list[array[int]] = []
    truncated: list[bool] = []
    rows = zip(texts, *([] if pairs is None else [pairs]), strict=True)
    for batch in call_batches(rows, lambda row: sum(map(len, row))):
        columns = [list(column) for column in zip(*batch, strict=True)]
        encoding = tokenizer(text_target=columns[0], **settings) if as_target else tokenizer(*columns, **settings)
        input_ids += [array("i", ids) for ids in encoding["input_ids"]]
        if pairs is not None:
            token_type_ids += [array("i", ids) for ids in encoding.get("token_type_ids", ())]
        if max_length is not None:
            truncated += _were_truncated(encoding, max_length)
    has_types = any(any(ids) for ids in token_type_ids)
    return Tokenized(input_ids, token_type_ids if has_types else None, truncated)


def tokenize_in_pieces(tokenizer: Any, texts: Sequence[str], max_length: int) -> Iterator[Sequence[int]]:
    """Tokenize texts and split long ones into pieces of `max_length` tokens, each with its special tokens.

    Raises:
        DataError: If `max_length` leaves no room for text besides the special tokens.
    """
    room = _room_for_text(tokenizer, max_length, pair=False)
    settings: dict[str, Any] = dict(_CALL_SETTINGS)
    if tokenizer.is_fast:
        settings |= {"truncation": True, "max_length": max_length, "return_overflowing_tokens": True}
    else:
        settings |= {"add_special_tokens": False}  # a slow tokenizer returns only the first piece of a truncated text
    for batch in call_batches(texts, len):
        for ids in tokenizer(batch, **settings)["input_ids"]:
            if tokenizer.is_fast:
                yield ids
                continue
            for first in range(0, max(len(ids), 1), room):
                yield tokenizer.build_inputs_with_special_tokens(ids[first : first + room])


def _room_for_text(tokenizer: Any, max_length: int, *, pair: bool) -> int:
    num_special = int(tokenizer.num_special_tokens_to_add(pair=pair))
    if max_length <= num_special:
        raise DataError(
            f"data.max_length {max_length} leaves no room for text: the tokenizer adds {num_special} special tokens",
            f"set data.max_length to more than {num_special}",
        )
    return max_length - num_special


def call_batches(items: Iterable[Item], num_characters: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Group items into tokenizer calls of at most `ROWS_PER_CALL` items and about `CHARACTERS_PER_CALL` characters.

    A fast tokenizer keeps all tokens of all texts of a call in memory, including those that it truncates.
    """
    batch: list[Item] = []
    total = 0
    for item in items:
        size = num_characters(item)
        if batch and (len(batch) == ROWS_PER_CALL or total + size > CHARACTERS_PER_CALL):
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def _were_truncated(encoding: Any, max_length: int) -> list[bool]:
    """Whether each text was truncated: fast tokenizers return the overflow; for slow ones, a full-length row counts."""
    if encoding.encodings:
        return [bool(row.overflowing) for row in encoding.encodings]
    return [len(ids) >= max_length for ids in encoding["input_ids"]]
