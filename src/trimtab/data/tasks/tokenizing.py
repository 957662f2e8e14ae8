"""Texts to token ids, a thousand rows a call: a fast tokenizer works on them in parallel, memory stays small."""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import DataError

ROWS_PER_CALL = 1000
CHARACTERS_PER_CALL = 4_000_000  # about 640 MB inside of a fast tokenizer


@dataclass(frozen=True)
class Tokenized:
    """Token ids of many texts.

    Args:
        input_ids: One array for each text.
        token_type_ids: For pairs, where the tokenizer tells first and second apart; else None. A row of zeros says
            nothing that a model does not assume anyway.
        truncated: For each text whether it was cut.
    """

    input_ids: list["array[int]"]
    token_type_ids: list["array[int]"] | None
    truncated: list[bool]

    @property
    def num_truncated(self) -> int:
        """How many texts were cut."""
        return sum(self.truncated)


def tokenize(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int | None,
    as_target: bool = False,
) -> Tokenized:
    """Tokenize many texts, or pairs of texts, with the special tokens that the tokenizer adds.

    Args:
        tokenizer: Any tokenizer of transformers.
        texts: The texts, or the first ones of the pairs.
        pairs: The second ones.
        max_length: Cut to this number of tokens, special ones included; of a pair the longer text is cut. None cuts
            nothing.
        as_target: Tokenize as what a sequence-to-sequence model is to write.

    Raises:
        DataError: If `max_length` leaves no room beside the special tokens.
    """
    if max_length is not None:
        _room_for_text(tokenizer, max_length, pair=pairs is not None)
    input_ids: list[array[int]] = []
    token_type_ids: list[array[int]] = []
    truncated: list[bool] = []
    for encoding in _calls(tokenizer, texts, pairs, max_length, as_target):
        input_ids += [array("i", ids) for ids in encoding["input_ids"]]
        if pairs is not None:
            token_type_ids += [array("i", ids) for ids in encoding.get("token_type_ids", ())]
        if max_length is not None:
            truncated += _truncated(encoding, max_length)
    tells_apart = any(any(ids) for ids in token_type_ids)
    return Tokenized(input_ids, token_type_ids if tells_apart else None, truncated)


def tokenize_in_pieces(tokenizer: Any, texts: Sequence[str], max_length: int) -> Iterator[Sequence[int]]:
    """Tokenize many texts and cut long ones into pieces of `max_length` tokens, each with its special tokens.

    Raises:
        DataError: If `max_length` leaves no room beside the special tokens.
    """
    room = _room_for_text(tokenizer, max_length, pair=False)
    settings: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    if tokenizer.is_fast:
        settings |= {"truncation": True, "max_length": max_length, "return_overflowing_tokens": True}
    else:
        settings |= {"add_special_tokens": False}  # a slow tokenizer would give the first piece of a text alone
    for rows in slices_of_calls(texts):
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
            f"max_length {max_length} leaves no room for text: the tokenizer adds {num_special} special tokens",
            "set data.max_length higher",
        )
    return max_length - num_special


def _calls(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str] | None, max_length: int | None, as_target: bool
) -> Iterator[Any]:
    settings: dict[str, Any] = {"return_attention_mask": False, "verbose": False}
    if max_length is not None:
        settings |= {"truncation": True, "max_length": max_length}
    for rows in slices_of_calls(texts, pairs):
        part = list(texts[rows])
        if as_target:
            yield tokenizer(text_target=part, **settings)
        elif pairs is None:
            yield tokenizer(part, **settings)
        else:
            yield tokenizer(part, list(pairs[rows]), **settings)


def slices_of_calls(texts: Sequence[str], pairs: Sequence[str] | None = None) -> Iterator[slice]:
    """Which rows are tokenized in one call: at most `ROWS_PER_CALL`, and fewer where texts are long.

    A fast tokenizer keeps all tokens of all texts of a call, also those that are cut off.
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


def _truncated(encoding: Any, max_length: int) -> list[bool]:
    """Fast tokenizers keep what they cut; of others it is only known that a row is full."""
    if encoding.encodings:
        return [bool(row.overflowing) for row in encoding.encodings]
    return [len(ids) >= max_length for ids in encoding["input_ids"]]
