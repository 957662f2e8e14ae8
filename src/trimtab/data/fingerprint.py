"""A digest of everything that determines the tokens of rows: the key of the token cache.

Values are digested with their types and lengths, so different values never produce the same bytes. A value of unknown
type raises an error.
"""

import dataclasses
import datetime
import decimal
import functools
import hashlib
import importlib.metadata
import json
import tempfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.data.rows import Rows

# Attributes of a tokenizer that do not change its tokens, or are part of its serialized content anyway.
_NOT_CONTENT = {"name_or_path", "init_kwargs", "init_inputs", "deprecation_warnings", "files_loaded", "verbose"}
_NOT_CONTENT |= {"_tokenizer", "_should_update_post_processor", "_processor_class", "_in_target_context_manager"}


class FingerprintError(TypeError):
    """The content of a value cannot be digested."""


def fingerprint(parts: Sequence[Any]) -> str:
    """Digest `parts` and the code that tokenizes them.

    Args:
        parts: Plain values, lists and dicts of them, dataclasses, tensors, `Rows` (by content, not by location) and
            tokenizers of transformers (by content, not by folder).

    Raises:
        FingerprintError: If a part has another type.
    """
    digest = hashlib.blake2b(digest_size=20)
    _feed(digest, [*_versions(), *parts])
    return digest.hexdigest()


def content_fingerprint(rows: Rows) -> str:
    """Digest only the contents of rows: equal rows have the same digest in any location and with any version.

    Raises:
        FingerprintError: If a column contains a value of unknown type.
    """
    digest = hashlib.blake2b(digest_size=20)
    _feed(digest, rows)
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    """Identify this package by the content of its code, so a changed task misses the cache; libraries by version."""
    code = hashlib.blake2b(digest_size=20)
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        _feed(code, [path.name, path.read_bytes()])
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("transformers", "tokenizers")]
    return (f"trimtab {trimtab.__version__}", code.hexdigest(), *others)


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, str):
        _feed_bytes(digest, b"text", value.encode("utf-8", "surrogatepass"))
    elif isinstance(value, bytes):
        _feed_bytes(digest, b"bytes", value)
    elif value is None or isinstance(value, bool | int | float):
        _feed_bytes(digest, type(value).__name__.encode(), repr(value).encode())
    elif isinstance(value, list | tuple):
        _feed_sequence(digest, value)
    elif isinstance(value, dict):
        _feed_bytes(digest, b"dict", str(len(value)).encode())
        for key in sorted(value, key=lambda key: (type(key).__name__, str(key))):
            _feed(digest, key)
            _feed(digest, value[key])
    elif isinstance(value, Rows):
        _feed(digest, ["rows", value.columns, value.label_names])
    elif isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        _feed(digest, ["tensor", str(value.dtype), list(value.shape), raw])
    elif hasattr(value, "get_vocab"):
        _feed(digest, ["tokenizer", *_tokenizer_content(value)])
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        _feed(digest, ["dataclass", f"{type(value).__module__}.{type(value).__qualname__}", fields])
    elif isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal | Path):
        _feed(digest, ["plain", type(value).__name__, repr(value)])
    elif isinstance(value, set | frozenset):
        _feed(digest, ["set", sorted(fingerprint([item]) for item in value)])
    elif hasattr(value, "item") and getattr(value, "shape", None) == ():
        _feed(digest, ["scalar", type(value).__name__, value.item()])  # a NumPy scalar
    else:
        raise FingerprintError(f"a {type(value).__name__} cannot be hashed")


def _feed_bytes(digest: Any, tag: bytes, content: bytes) -> None:
    digest.update(b"%s %d:" % (tag, len(content)))
    digest.update(content)


def _feed_sequence(digest: Any, values: Sequence[Any]) -> None:
    """Digest lists of only strings or only integers (whole columns) in one call."""
    kinds = set(map(type, values))
    if kinds == {str}:
        _feed_bytes(digest, b"lengths", array("q", map(len, values)).tobytes())
        _feed_bytes(digest, b"texts", "".join(values).encode("utf-8", "surrogatepass"))
        return
    if kinds == {int}:
        try:
            _feed_bytes(digest, b"integers", array("q", values).tobytes())
            return
        except OverflowError:
            pass
    _feed_bytes(digest, b"sequence", str(len(values)).encode())
    for value in values:
        _feed(digest, value)


def _tokenizer_content(tokenizer: Any) -> list[Any]:
    kind = f"{type(tokenizer).__module__}.{type(tokenizer).__qualname__}"
    settings = {name: _plain(value) for name, value in vars(tokenizer).items() if name not in _NOT_CONTENT}
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if hasattr(backend, "to_str"):
        content = json.loads(backend.to_str())
        # A call leaves its truncation and padding in the backend; they are not part of the tokenizer.
        content.pop("truncation", None)
        content.pop("padding", None)
        return [kind, settings, json.dumps(content, sort_keys=True)]
    if not kind.startswith("transformers."):
        raise FingerprintError(f"the content of the tokenizer {kind} cannot be read")
    return [kind, settings, tokenizer.get_vocab(), _vocabulary_files(tokenizer)]


def _vocabulary_files(tokenizer: Any) -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            tokenizer.save_vocabulary(folder)
        except NotImplementedError:
            return []
        return [path.read_bytes() for path in sorted(Path(folder).iterdir())]


def _plain(value: Any) -> Any:
    """Convert a setting of a tokenizer to plain values: tokens to text, other objects (caches) to their type name."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple | set | frozenset):
        items = [_plain(item) for item in value]
        return sorted(items, key=repr) if isinstance(value, set | frozenset) else items
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value) if type(value).__name__ == "AddedToken" else type(value).__name__
