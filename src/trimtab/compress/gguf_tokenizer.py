"""The tokenizer inside a GGUF file: tokens, their types and scores or merges, special tokens and the chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.errors import MissingDependency, ModelError

_CURE = "--to onnx or --to merged"
_SAMPLES = (
    "The quick brown fox jumps over the lazy dog.",
    "It's 12 o'clock, isn't it? They'll pay 3,499.50 €!",
    "Grüße aus Köln; l'été à Montréal; Привет, мир; 你好",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(10))",
    "tabs\tand   several  spaces, (brackets) [too] {1} #tag @name 🙂",
)


def add_tokenizer(writer: Any, tokenizer: Any, num_rows: int) -> None:
    """Add a tokenizer to a GGUF file.

    Args:
        writer: A `gguf.GGUFWriter`.
        tokenizer: A fast tokenizer of transformers with a BPE model.
        num_rows: Rows of the embedding; rows without a token are filled with unused tokens.

    Raises:
        ModelError: GGUF cannot represent the tokenizer.
    """
    content = _content_of(tokenizer)
    model, is_byte_level = content["model"], _is_byte_level(content)
    tokens = _tokens(tokenizer, num_rows)
    writer.add_tokenizer_model("gpt2" if is_byte_level else "llama")
    writer.add_tokenizer_pre(_split_name(content) if is_byte_level else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(_token_types(tokenizer, content, tokens, is_byte_level))
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    if is_byte_level:
        writer.add_token_merges([" ".join(merge) for merge in merges])
    else:
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_adds_space(content))
    ids = {"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id}
    ids |= {"unk": tokenizer.unk_token_id, "pad": tokenizer.pad_token_id}
    for name, value in ids.items():
        if value is not None:
            getattr(writer, f"add_{name}_token_id")(value)
    empty = tokenizer("")["input_ids"]
    writer.add_add_bos_token(empty[:1] == [ids["bos"]])
    writer.add_add_eos_token(empty[-1:] == [ids["eos"]])
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def check_tokens(tokenizer: Any, read_back: Any) -> None:
    """Compare the tokens of sample texts, without the special tokens around them.

    Raises:
        ModelError: A text has different tokens.
    """
    for text in _SAMPLES:
        own = tokenizer(text, add_special_tokens=False)["input_ids"]
        other = read_back(text, add_special_tokens=False)["input_ids"]
        if own != other:
            raise ModelError(
                f"the tokenizer changes in GGUF: {text!r} becomes {own[:12]}…, read back {other[:12]}…; nothing "
                "was written",
                _CURE,
            )


def _content_of(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {} if backend is None else json.loads(backend.to_str())
    kind = content.get("model", {}).get("type")
    if kind != "BPE":
        found = kind or type(tokenizer).__name__
        raise ModelError(f"a tokenizer of type {found} cannot be written as GGUF (supported: BPE)", _CURE)
    return content


def _is_byte_level(content: Mapping[str, Any]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(content["pre_tokenizer"], "pretokenizers"))


def _adds_space(content: Mapping[str, Any]) -> bool:
    before = _parts(content["pre_tokenizer"], "pretokenizers")
    spaced = any(part["type"] == "Metaspace" and part.get("prepend_scheme") != "never" for part in before)
    return spaced or any(part["type"] == "Prepend" for part in _parts(content["normalizer"], "normalizers"))


def _parts(part: Mapping[str, Any] | None, key: str) -> Sequence[Mapping[str, Any]]:
    if part is None:
        return []
    return part[key] if part["type"] == "Sequence" else [part]


def _split_name(content: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the way a byte-level tokenizer splits text into words."""
    parts = _parts(content["pre_tokenizer"], "pretokenizers")
    if len(parts) == 1 and parts[0].get("use_regex") and not parts[0].get("add_prefix_space"):
        return "gpt-2"
    patterns = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    known = _known_splits()
    for name in ("llama-bpe", "qwen2", "tekken", "gpt-4o"):
        if len(parts) == 2 and patterns == [known[name]]:
            return name
    raise ModelError("GGUF has no name for the way this tokenizer splits text into words", _CURE)


def _known_splits() -> Mapping[str, str]:
    """Patterns of llama.cpp's names, from transformers, which reads the file back with them."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:
        import transformers

        found = f"transformers {transformers.__version__} cannot read tokenizers of this type from a GGUF file"
        raise MissingDependency(found, "pip install --upgrade transformers") from None
    return dict(GGUF_PRE_TOKENIZER_SPLITS)


def _tokens(tokenizer: Any, num_rows: int) -> list[str]:
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(by_id) >= num_rows:
        raise ModelError(f"the tokenizer has {max(by_id) + 1} tokens, the model {num_rows} embeddings", _CURE)
    return [by_id.get(index, f"[PAD{index}]") for index in range(num_rows)]


def _token_types(tokenizer: Any, content: Mapping[str, Any], tokens: Sequence[str], is_byte_level: bool) -> list[int]:
    import gguf

    types = gguf.TokenType
    added = {
        token["id"]: types.CONTROL if token["special"] else types.USER_DEFINED for token in content["added_tokens"]
    }
    known = set(tokenizer.get_vocab().values())
    found: list[int] = []
    for index, token in enumerate(tokens):
        kind = added.get(index, types.NORMAL if index in known else types.UNUSED)
        if not is_byte_level and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            kind = types.BYTE
        elif not is_byte_level and index == tokenizer.unk_token_id:
            kind = types.UNKNOWN
        found.append(int(kind))
    return found


def _scores(tokens: Sequence[str], merges: Sequence[Sequence[str]]) -> list[float]:
    """Return a score for each token that prefers earlier merges, as SentencePiece's own scores do."""
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
