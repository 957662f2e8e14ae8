"""Prefix tuning: trainable keys and values before those of each row, in every block, as in PEFT.

Blocks get them through the argument for the key-value cache of generation. Outside generation this is a cache that
stores nothing, so a recomputed block gets the same keys and values. In generation the prefix is put into the cache
once; afterwards only masks and positions take it into account.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicLayer

from trimtab.errors import RecipeError
from trimtab.model.virtual_tokens import VIRTUAL_MODULE, check_prompt

_KNOWN_LAYERS = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class PrefixSpec:
    """Configuration of prefix tuning.

    Attributes:
        tokens: Number of virtual tokens, whose keys and values are trained.
    """

    tokens: int = 20


class _PrefixLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """The keys and values of one block, returned before those of the rows, which are not stored."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values, self.is_initialized = keys, values, True
        self._prefix = keys, values

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the prefix followed by the states of the rows."""
        keys, values = self._prefix
        return _with_prefix(keys, key_states), _with_prefix(values, value_states)


class PrefixCache(Cache):
    """A cache that gives every block its prefix, and stores nothing.

    Args:
        states: Keys and values of each block.
    """

    stores_nothing = True

    def __init__(self, states: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__(layers=[_PrefixLayer(keys, values) for keys, values in states])
        self.requires_grad = any(keys.requires_grad for keys, _ in states)  # whether the prefix is trainable


def _with_prefix(prefix: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    if (prefix.shape[1], prefix.shape[3]) != (states.shape[1], states.shape[3]):
        raise RecipeError(
            f"adapter: prefix has {prefix.shape[1]} heads of width {prefix.shape[3]}, according to the model's "
            f"config, but a block has {states.shape[1]} of width {states.shape[3]}",
            "adapter: prompt or lora",
        )
    return torch.cat([prefix.to(states.dtype), states], dim=-2)


class PrefixTokens(nn.Module):
    """The keys and values of virtual tokens, and the hook of the base model that uses them.

    Args:
        weight: Their initial values: [tokens, blocks × 2 × heads × head size], keys before values in each block.
        num_heads: Number of heads of keys and values.
        num_blocks: Number of blocks.
    """

    def __init__(self, weight: torch.Tensor, num_heads: int, num_blocks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._num_heads, self._num_blocks = num_heads, num_blocks

    def _states(self, num_rows: int, dtype: torch.dtype | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of each block: [rows, heads, tokens, head size]."""
        weight = self.weight if dtype is None else self.weight.to(dtype)
        states = weight.view(len(weight), 2 * self._num_blocks, self._num_heads, -1).permute(1, 2, 0, 3)
        rows = states.unsqueeze(1).expand(-1, num_rows, -1, -1, -1)
        return [(rows[index], rows[index + 1]) for index in range(0, 2 * self._num_blocks, 2)]

    def before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Pass the prefix as the cache, or put it into an empty cache; adjust masks and positions."""
        names = list(inspect.signature(base.forward).parameters)[: len(args)] if args else []
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        num = len(self.weight)
        for name in ("attention_mask", "position_ids"):
            if values.get(name) is not None:
                values[name] = _count_prefix(name, values[name], num)
        inputs = values["input_ids"] if values.get("input_ids") is not None else values["inputs_embeds"]
        cache = values.get("past_key_values")
        if cache is None:
            return (), {**values, "past_key_values": PrefixCache(self._states(len(inputs)))}
        if cache.get_seq_length() == 0:
            device = self.weight.device.type
            is_autocast = torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_autocast else base.get_input_embeddings().weight.dtype
            for index, (keys, states) in enumerate(self._states(len(inputs), dtype)):
                cache.update(keys, states, index)
        return (), values

    def after(self, base: nn.Module, args: Any, output: Any) -> Any:
        """Drop the cache that stores nothing: a caller would mistake it for the cache of a generation."""
        if not isinstance(output, tuple) and isinstance(output.get("past_key_values"), PrefixCache):
            output["past_key_values"] = None
        return output


def _count_prefix(name: str, tensor: torch.Tensor, num_tokens: int) -> torch.Tensor:
    if name == "position_ids":
        return tensor + num_tokens
    return torch.cat([tensor.new_ones(len(tensor), num_tokens), tensor], dim=1)


def check_prefix(model: Any, kept: Sequence[str]) -> None:
    """Refuse models that cannot be tuned by a prefix.

    Raises:
        RecipeError: The model cannot be tuned; the message says why.
    """
    check_prompt(model, kept, "prefix")
    config, cure = model.config.get_text_config(), "adapter: prompt or lora"
    name = type(model).__name__
    if "past_key_values" not in inspect.signature(model.base_model.forward).parameters:
        raise RecipeError(f"adapter: prefix needs blocks that take keys and values, but {name} has no such cache", cure)
    odd = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYERS
    if odd or any(getattr(config, key, None) for key in ("num_kv_shared_layers", "kv_lora_rank")):
        what = f"blocks of type {min(odd)}" if odd else "keys and values that blocks share or compress"
        raise RecipeError(f"adapter: prefix does not support {what} ({name})", cure)


def attach_prefix(model: Any, config: Any) -> None:
    """Add a prefix to a model in place; its initial values are those of PEFT."""
    from peft import PrefixEncoder

    weight = PrefixEncoder(config).embedding.weight.detach()  # type: ignore[no-untyped-call]
    tokens = PrefixTokens(weight, config.num_attention_heads, config.num_layers)
    setattr(model, VIRTUAL_MODULE, tokens)
    model.base_model.register_forward_pre_hook(tokens.before, with_kwargs=True)
    model.base_model.register_forward_hook(tokens.after)


def prefix_config(model: Any, num_tokens: int, base: tuple[str | None, str | None]) -> Any:
    """PEFT's config of a prefix. If heads share keys and values, heads are those of keys, as in PEFT."""
    from peft import PrefixTuningConfig

    text = model.config.get_text_config()
    num_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    config = PrefixTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=num_tokens,
        token_dim=num_heads * head_size,
        num_transformer_submodules=1,
        num_attention_heads=num_heads,
        num_layers=text.num_hidden_layers,
        inference_mode=True,
    )
    config.base_model_name_or_path, config.revision = base
    return config
