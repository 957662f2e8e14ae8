"""Scaled rotary embeddings in GGUF files: written as llama.cpp reads them, and read into a config of transformers.

`linear` and `yarn` are keys of the header. `llama3` is a tensor of divisors of the frequencies, which llama.cpp reads
only for the architecture `llama`. transformers reads neither, so this module adds them to the config. A header has
fewer numbers than a config, so trimtab's files also contain the config's own values, in a key that llama.cpp ignores.
"""

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import ModelError
from trimtab.log import say

FACTORS = "rope_freqs.weight"  # name of the tensor of divisors
_OWN_KEY = "trimtab.rope_parameters"
_YARN_BETAS = (32.0, 1.0)  # llama.cpp has these for all architectures that are written here
# of Llama 3.1, 3.2 and 3.3; their factor is the largest divisor
_LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MAX_EPS = 64  # frequencies are powers computed in fp32 by one side and in fp64 by the other


def check_rope(config: Any, architecture: str, cure: str) -> None:
    """Refuse rotary embeddings that llama.cpp could not compute.

    Args:
        config: Config of the model.
        architecture: Its architecture in GGUF.
        cure: What to do instead.

    Raises:
        ModelError: GGUF cannot represent them.
    """
    rope = config.rope_parameters
    kind = _kind(rope)
    problem = ""
    if kind not in ("default", "linear", "yarn", "llama3"):
        problem = f"rotary embeddings of type {kind!r} cannot be stored in GGUF for {architecture}"
    elif kind == "llama3" and architecture != "llama":
        problem = f"rotary embeddings of type 'llama3' are read by llama.cpp only for llama, not for {architecture}"
    elif kind == "yarn" and _betas(rope) != _YARN_BETAS:
        found = " and ".join(f"{beta:g}" for beta in _betas(rope))
        problem = f"yarn has beta_fast and beta_slow {found}; llama.cpp computes {architecture} with 32 and 1"
    elif kind == "yarn" and rope.get("truncate", True) is False:
        problem = "yarn has truncate: false, which llama.cpp does not compute"
    elif rope.get("partial_rotary_factor", 1.0) != 1.0:
        problem = f"rotary embeddings of a part of each head cannot be stored in GGUF for {architecture}"
    if problem:
        raise ModelError(problem, cure)


def add_rope(writer: Any, model: Any) -> None:
    """Add the keys of rotary embeddings to a header."""
    import gguf

    config, rope = model.config, model.config.rope_parameters
    kind = _kind(rope)
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if kind == "default":
        return
    writer.add_string(_OWN_KEY, json.dumps(rope))
    if kind == "llama3":
        return  # a tensor
    factor = _factor(config)
    writer.add_rope_scaling_type(gguf.RopeScalingType[kind.upper()])
    writer.add_rope_scaling_factor(factor)
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(int(rope["original_max_position_embeddings"]))
        # llama.cpp multiplies by the attention factor
        own = model.model.rotary_emb.attention_scaling / _yarn_scaling(factor)
        if abs(own - 1) > torch.finfo(torch.float32).eps:
            writer.add_rope_scaling_attn_factors(own)


def rope_factors(config: Any) -> torch.Tensor | None:
    """Return the divisors of the frequencies for `llama3`; None for other types."""
    rope = config.rope_parameters
    return _llama3_factors(rope, _head_size(config)) if _kind(rope) == "llama3" else None


def check_written_rope(reader: Any, model: Any, cure: str) -> None:
    """Check that llama.cpp computes the rotary embeddings of a model from its file.

    Args:
        reader: The opened file.
        model: The model.
        cure: What to do instead.

    Raises:
        ModelError: Frequencies or the factor of cosine and sine differ by more than rounding explains.
    """
    frequencies, scaling = _as_llama_cpp(reader, _head_size(model.config))
    rotary = model.model.rotary_emb
    limit = _MAX_EPS * torch.finfo(torch.float32).eps
    gap = (frequencies / rotary.inv_freq.double() - 1).abs().max().item()
    gap = max(gap, abs(scaling / rotary.attention_scaling - 1))
    if not gap <= limit:
        raise ModelError(f"the rotary embeddings of the GGUF file differ from those of the model by {gap:.2g}", cure)


def set_rope(config: Any, path: Path) -> None:
    """Set the rotary embeddings of a config that transformers read from a GGUF file."""
    if getattr(config, "rope_parameters", None) is None:
        return  # a model without rotary embeddings
    stat = path.stat()
    found = _read_rope(path, stat.st_mtime_ns, stat.st_size)
    if found is not None:
        config.rope_parameters = {**config.rope_parameters, **found}


@lru_cache(maxsize=8)
def _read_rope(path: Path, mtime_ns: int, num_bytes: int) -> Mapping[str, Any] | None:
    """Return the settings of scaled rotary embeddings in a file; None if they are not scaled."""
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except (ValueError, KeyError, IndexError):
        return None  # transformers has reported, or will report, what is wrong with the file
    if (own := reader.get_field(_OWN_KEY)) is not None:
        return _parsed(path, own.contents())
    kind, factor = _value(reader, "scaling.type", "none"), _value(reader, "scaling.factor", 1.0)
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = _value(reader, "scaling.original_context_length", 0)
        scaling = _value(reader, "scaling.attn_factor", 1.0) * _yarn_scaling(factor)
        found = {"rope_type": kind, "factor": factor, "attention_factor": scaling}
        return found | ({"original_max_position_embeddings": context} if context else {})
    return _known_factors(path, reader)


def _parsed(path: Path, text: Any) -> Mapping[str, Any]:
    try:
        stored = json.loads(text)
    except (TypeError, ValueError):
        stored = None
    if not isinstance(stored, dict):
        raise ModelError(f"{path}: {_OWN_KEY} is {text!r:.80}, which is not a JSON object", "export the model again")
    return stored


def _known_factors(path: Path, reader: Any) -> Mapping[str, Any] | None:
    """Return the settings of Llama 3 if the divisors of a file are theirs."""
    factors = _factors(reader)
    if factors is None:
        return None
    rope = {"rope_type": "llama3", "factor": factors.max().item(), **_LLAMA3}
    expected = _llama3_factors(rope | {"rope_theta": _value(reader, "freq_base", 1e4)}, 2 * len(factors))
    if torch.allclose(factors, expected.double(), rtol=1e-4, atol=0.0):
        return rope
    say(f"{path}: the divisors of its rotary frequencies are not those of Llama 3, and are ignored")
    return None


def _as_llama_cpp(reader: Any, head_size: int) -> tuple[torch.Tensor, float]:
    """Return the frequencies, and the factor of cosine and sine, that llama.cpp computes from a file."""
    theta, factor = _value(reader, "freq_base", 1e4), _value(reader, "scaling.factor", 1.0)
    kind = _value(reader, "scaling.type", "none")
    frequencies = _frequencies(theta, head_size)
    if (divisors := _factors(reader)) is not None:
        frequencies = frequencies / divisors
    scaling = _value(reader, "scaling.attn_factor", 1.0)
    if kind == "none":
        return frequencies, scaling
    if kind == "linear":
        return frequencies / factor, scaling
    context = _value(reader, "scaling.original_context_length", _value(reader, "context_length", 0, ""))
    low, high = (head_size * math.log(context / (beta * 2 * math.pi)) / (2 * math.log(theta)) for beta in _YARN_BETAS)
    low, high = max(0, math.floor(low)), min(head_size - 1, math.ceil(high))
    ramp = ((torch.arange(head_size // 2).double() - low) / max(0.001, high - low)).clamp(0, 1)
    return frequencies / factor * ramp + frequencies * (1 - ramp), scaling * _yarn_scaling(factor)


def _llama3_factors(rope: Mapping[str, Any], head_size: int) -> torch.Tensor:
    """Return the divisors: 1 for short waves, the factor for long ones, and interpolated values in between."""
    waves_per_context = (
        rope["original_max_position_embeddings"] * _frequencies(rope["rope_theta"], head_size) / math.tau
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth: torch.Tensor = ((waves_per_context - low) / (high - low)).clamp(0, 1)
    share: torch.Tensor = (1 - smooth) / rope["factor"] + smooth
    return (1 / share).float()


def _frequencies(theta: float, head_size: int) -> torch.Tensor:
    return torch.pow(theta, -torch.arange(0, head_size, 2).double() / head_size)


def _yarn_scaling(factor: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _kind(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or "default")


def _betas(rope: Mapping[str, Any]) -> tuple[float, float]:
    return float(rope.get("beta_fast") or _YARN_BETAS[0]), float(rope.get("beta_slow") or _YARN_BETAS[1])


def _factor(config: Any) -> float:
    rope = config.rope_parameters
    found = rope.get("factor") or config.max_position_embeddings / rope["original_max_position_embeddings"]
    return float(found)


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _factors(reader: Any) -> torch.Tensor | None:
    found = next((tensor for tensor in reader.tensors if tensor.name == FACTORS), None)
    return None if found is None else torch.from_numpy(found.data.copy()).double()


def _value(reader: Any, name: str, default: Any, group: str = "rope.") -> Any:
    """Return the value of a key of the architecture."""
    architecture = reader.get_field("general.architecture")
    field = None if architecture is None else reader.get_field(f"{architecture.contents()}.{group}{name}")
    return default if field is None else field.contents()
