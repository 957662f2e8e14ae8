"""Refuse files of a model that ask for far more memory or time than any real model does.

A few bytes of a config or a tokenizer can ask for terabytes. The limits leave room for every published model.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.errors import ModelError

MAX_BEAMS = 100
_MAX_GROWTH = 1000  # characters that a tokenizer may make of one
_UNUSED_IDS = 1_000_000  # ids without a token
_MAX_LAYERS = 10_000
_SPARE_PARAMETERS = 100_000_000
_PARAMETERS_PER_BYTE = 8  # of weights in one bit
_WEIGHT_FILES = (".safetensors", ".bin", ".gguf", ".onnx")
_CURE = "it is damaged: download or save the model again"


def check_sizes(source: str, config: Any, folder: Path | None = None) -> None:
    """Refuse a config with too many layers, or of a much larger model than the weights in a local folder.

    Only sizes that weight matrices of every model have are used, for a lower bound of the number of parameters.
    """
    text = config.get_text_config()
    names = ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size")
    sizes = {name: getattr(text, name, None) for name in names}
    hidden, layers, vocabulary, inner = (size if isinstance(size, int) else 0 for size in sizes.values())
    if layers > _MAX_LAYERS:
        raise ModelError(f"the config of {source} describes {layers:,} layers", f"use {_MAX_LAYERS:,} or fewer")
    files = folder.iterdir() if folder is not None and folder.is_dir() else ()
    num_bytes = sum(path.stat().st_size for path in files if path.suffix in _WEIGHT_FILES)
    least = hidden * (hidden * layers + vocabulary + inner)
    if num_bytes and least > _PARAMETERS_PER_BYTE * num_bytes + _SPARE_PARAMETERS:
        found = ", ".join(f"{name}: {size}" for name, size in sizes.items() if isinstance(size, int))
        raise ModelError(
            f"the config of {source} describes {least:,} parameters or more ({found}), and its weights have "
            f"{num_bytes:,} bytes",
            _CURE,
        )


def check_tokenizer(source: str, tokenizer: Any, num_ids: int) -> None:
    """Refuse a tokenizer with ids far above its number of tokens, or one that makes thousands of tokens of each."""
    if num_ids > 2 * len(tokenizer) + _UNUSED_IDS:
        raise ModelError(
            f"the tokenizer of {source} has a token with the id {num_ids - 1:,}, and {len(tokenizer):,} tokens", _CURE
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "post_processor", "decoder"):
        part = getattr(backend, name, None)
        growth = _growth(json.loads(part.__getstate__())) if part is not None else 1
        if growth > _MAX_GROWTH:
            raise ModelError(
                f"the {name} in tokenizer.json of {source} makes {growth:,} characters or tokens of one",
                "use the tokenizer of another model: set model.tokenizer",
            )


def _growth(part: Mapping[str, Any]) -> int:
    """How many characters a part of a tokenizer can make of one, or how many copies of a text."""
    kind = part.get("type")
    if kind == "Sequence":
        steps = part.get("normalizers") or part.get("processors") or part.get("decoders") or []
        return math.prod(_growth(step) for step in steps)
    if kind == "Replace":
        return max(len(part["content"]) // max(len(part["pattern"].get("String", "")), 1), 1)
    if kind == "TemplateProcessing":
        return max(sum("Sequence" in piece for piece in part[form]) for form in ("single", "pair"))
    return 1
