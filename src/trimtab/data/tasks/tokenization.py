"""Texts to token ids, in calls of bounded size: a fast tokenizer works in parallel within a call."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trimtab.errors import DataError

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
        max_length: Truncate to this number of tokens, special tokens included; of a pair the longer text is
            truncated. None truncates nothing.
        as_target: Tokenize as targets of a sequence-to-sequence model.

    Raises:
        DataError: If `max_length` leaves no room for text beside the special tokens.
    """
    settings: dict[str, Any] = dict(_CALL_SETTINGS)
    if max_length is not None:
        _room_for_text(tokenizer, max_length, pair=pairs is not None)
        settings |= {"truncation": True, "max_length": max_length}
    input_ids: list[array[int]] = []
    token_type_ids: list[array[int]] = []
    truncated: list[bool] = []
    for rows in call_slices(texts, pairs):
        part = list(texts[rows])
        if as_target:
            encoding = tokenizer(text_target=part, **settings)
        else:
            encoding = tokenizer(part, *([] if pairs is None else [list(pairs[rows])]), **settings)
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
        DataError: If `max_length` leaves no room for text beside the special tokens.
    """
    room = _room_for_text(tokenizer, max_length, pair=False)
    settings: dict[str, Any] = dict(_CALL_SETTINGS)
    if tokenizer.is_fast:
        settings |= {"truncation": True, "max_length": max_length, "return_overflowing_tokens": True}
    else:
        settings |= {"add_special_tokens": False}  # a slow tokenizer returns only the first piece of a truncated text
    for rows in call_slices(texts):
        for ids in tokenizer(list(texts[rows]), **settings)["input_ids"]:
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


def call_slices(texts: Sequence[str], pairs: Sequence[str] | None = None) -> Iterator[slice]:
    """Split rows into tokenizer calls of at most `ROWS_PER_CALL` rows and about `CHARACTERS_PER_CALL` characters.

    A fast tokenizer keeps all tokens of all texts of a call in memory, also those that it truncates.
    """
    start = num_characters = 0
    for index, text in enumerate(texts):
        size = len(text) + (0 if pairs is None else len(pairs[index]))
        is_full = index - start == ROWS_PER_CALL or num_characters + size > CHARACTERS_PER_CALL
        if is_full and index > start:
            yield slice(start, index)
            start, num_characters = index, 0
        num_characters += size
    if start < len(texts):
        yield slice(start, len(texts))


def _were_truncated(encoding: Any, max_length: int) -> list[bool]:
    """Fast tokenizers return the overflow; for slow ones, a row of full length counts as truncated."""
    if encoding.encodings:
        return [bool(row.overflowing) for row in encoding.encodings]
    return [len(ids) >= max_length for ids in encoding["input_ids"]]
