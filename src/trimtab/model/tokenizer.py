"""Tokenizers: loaded with a pad token, or trained from texts for a model that is trained from scratch."""

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trimtab.errors import DataError, ModelError, RecipeError
from trimtab.log import say
from trimtab.model.config import num_token_ids
from trimtab.model.hub import Source, as_source, check_text, model_errors_explained, quiet_transformers
from trimtab.model.limits import check_tokenizer

_BYTE_LEVEL_TOKENS = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}
_WORD_PIECE_TOKENS = {"pad": "[PAD]", "unk": "[UNK]", "bos": "[CLS]", "eos": "[SEP]", "mask": "[MASK]"}
# Vocabulary files of common tokenizers, used if the tokenizer class, and so its own file names, is unknown.
_VOCABULARY_FILES = ("vocab.*", "merges.txt", "*.model", "*.bpe.*", "tekken.json", "tokenizer_config.json")
_NAME_A_TOKENIZER = (
    "set model.tokenizer (--set model.tokenizer=NAME_OR_FOLDER), or save one into the model's folder with "
    "save_pretrained"
)
_MAX_ALPHABET = 1000  # characters; rarer ones become the unknown token


def load_tokenizer(source: str, *, trust_remote_code: bool = False) -> Any:
    """Load a tokenizer, and give it a pad token if it has none.

    Args:
        source: A run, a folder, a `.gguf` file or a Hub name.
        trust_remote_code: Whether Python code from the tokenizer's repository may be executed.

    Raises:
        ModelError: There is no tokenizer.
    """
    from transformers import AutoTokenizer

    own = Path(os.path.expanduser(source))  # the folder may contain a tokenizer without a model
    is_tokenizer_folder = (own / "tokenizer_config.json").is_file()
    place = Source(str(own)) if is_tokenizer_folder else as_source(source, adapters=True)
    with (
        quiet_transformers(),
        model_errors_explained(source, "the tokenizer of ", _NAME_A_TOKENIZER, folder=place.name),
    ):
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                place.name, trust_remote_code=trust_remote_code, **place.arguments
            )
        except Exception as error:
            if place.gguf_file is None and not _has_vocabulary(Path(place.name), _VOCABULARY_FILES):
                raise ModelError(f"{source} contains no tokenizer", _NAME_A_TOKENIZER) from error
            raise
        check_text(tokenizer.init_kwargs)
        check_tokenizer(source, tokenizer, num_token_ids(tokenizer))
        # Without files transformers silently returns a tokenizer with special tokens only.
        wanted = getattr(tokenizer, "vocab_files_names", {}).values()  # empty for byte tokenizers
        is_empty = len(tokenizer) <= len(tokenizer.all_special_tokens)
        if is_empty or (wanted and place.gguf_file is None and not _has_vocabulary(Path(place.name), wanted)):
            raise ModelError(f"{source} contains no tokenizer", _NAME_A_TOKENIZER)
        note = give_pad_token(tokenizer)
    if note:
        say(f"{source}: {note}")
    return tokenizer


def _has_vocabulary(folder: Path, names: Iterable[str]) -> bool:
    """Whether a local folder contains one of the files; assumed for Hub names."""
    if not folder.is_dir():
        return True
    return any(any(folder.glob(name)) for name in {*names, "tokenizer.json", "tokenizer.*.json"})


def give_pad_token(tokenizer: Any) -> str:
    """Give a tokenizer a pad token if it has none.

    Returns:
        A remark for the log; empty if nothing was changed.
    """
    if tokenizer.pad_token_id is not None:
        return ""
    if tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
        return f"the tokenizer has no pad token: its end token {tokenizer.eos_token} is used (padding has no loss)"
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    return "the tokenizer has neither a pad nor an end token: [PAD] was added"


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: str = "bpe") -> Any:
    """Train a tokenizer for a model that is trained from scratch.

    A text is encoded as BOS, its tokens, EOS; a pair has an EOS after each text. BOS is also the CLS token and EOS the
    SEP token, so encoders, decoders and encoder-decoders can use it.

    Args:
        texts: Training texts.
        vocab_size: Maximum number of tokens.
        kind: "bpe" is byte-level and lossless; "wordpiece" is as in BERT, lower-case.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    if kind not in _KINDS:
        raise RecipeError(f"unknown kind of tokenizer: {kind!r}", f"use one of {', '.join(_KINDS)}")
    documents = list(texts)
    if not documents:
        raise DataError("there is no text to train a tokenizer on", "set data.text to the text column")
    names, train = _KINDS[kind]
    special = list(names.values())
    tokenizer = train(documents, vocab_size, special)
    begin, end = names["bos"], names["eos"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, special.index(begin)), (end, special.index(end))],
    )
    fast_class: Any = PreTrainedTokenizerFast
    return fast_class(
        tokenizer_object=tokenizer,
        cls_token=begin,
        sep_token=end,
        **{f"{role}_token": token for role, token in names.items()},
    )


def _byte_level(documents: list[str], vocab_size: int, special: list[str]) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    _check_size(vocab_size, len(special) + len(alphabet))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _word_piece(documents: list[str], vocab_size: int, special: list[str]) -> Any:
    """Train WordPiece. The order of ## characters would differ between runs, so they are passed as special tokens."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts = Counter(char for text in documents for char in normalizer.normalize_str(text) if not char.isspace())
    alphabet = sorted(sorted(counts, key=lambda char: (-counts[char], char))[:_MAX_ALPHABET])
    fixed = [*special, *(f"##{char}" for char in alphabet)]
    _check_size(vocab_size, len(fixed) + len(alphabet))
    trained = Tokenizer(models.WordPiece(unk_token=special[1]))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=fixed,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    trained.train_from_iterator(documents, trainer)
    # Only the vocabulary is used: as special tokens, ## characters would be matched inside any text.
    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token=special[1]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    return tokenizer


def _check_size(vocab_size: int, smallest: int) -> None:
    if vocab_size <= smallest:
        raise RecipeError(
            f"vocab_size {vocab_size} leaves no room for tokens of text", f"use a number above {smallest}"
        )


_KINDS = {"bpe": (_BYTE_LEVEL_TOKENS, _byte_level), "wordpiece": (_WORD_PIECE_TOKENS, _word_piece)}
