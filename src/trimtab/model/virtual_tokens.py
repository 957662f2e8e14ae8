"""Prompt tuning: trainable embeddings of virtual tokens before each row, as in PEFT.

The base model (without its head) gets embeddings instead of token ids, with the virtual tokens first, and its output is
returned without them: heads, losses and labels see the original rows. In later steps of generation the virtual tokens
are in the cache; only masks and positions take them into account.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trimtab.errors import RecipeError

VIRTUAL_MODULE = "virtual_tokens"  # its name in the model
IN_FILE = "prompt_embeddings"  # its name in PEFT's files


@dataclass(frozen=True)
class PromptSpec:
    """Configuration of prompt tuning.

    Attributes:
        tokens: Number of virtual tokens.
    """

    tokens: int = 20


class VirtualTokens(nn.Module):
    """The embeddings of the virtual tokens, and the hooks of the base model that use them.

    Args:
        weight: Their initial values: [tokens, embedding size].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self._is_first = False

    def before(self, base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        """Put the virtual tokens before the rows, or take them into account if they are already in the cache."""
        names = list(inspect.signature(base.forward).parameters)[: len(args)] if args else []
        values = {**dict(zip(names, args, strict=True)), **kwargs}
        cache, mask, num = values.get("past_key_values"), values.get("attention_mask"), len(self.weight)
        self._is_first = cache is None or cache.get_seq_length() == 0
        if mask is not None:
            values["attention_mask"] = torch.cat([mask.new_ones(len(mask), num), mask], dim=1)
        positions = values.get("position_ids")
        if positions is not None:
            moved = positions + num
            first = torch.arange(num, device=moved.device).expand(len(moved), num)
            values["position_ids"] = torch.cat([first, moved], dim=1) if self._is_first else moved
        if self._is_first:
            embeddings = values.get("inputs_embeds")
            if embeddings is None:
                embeddings = base.get_input_embeddings()(values.pop("input_ids"))
            virtual = self.weight.to(embeddings.dtype).expand(len(embeddings), -1, -1)
            values["inputs_embeds"] = torch.cat([virtual, embeddings], dim=1)
        return (), values

    def after(self, base: nn.Module, args: Any, output: Any) -> Any:
        """Return only the hidden states of the rows."""
        if not self._is_first:
            return None
        num = len(self.weight)
        if isinstance(output, tuple):
            return output[0][:, num:], *output[1:]
        output["last_hidden_state"] = output["last_hidden_state"][:, num:]
        return output


def check_prompt(model: Any, kept: Sequence[str], kind: str = "prompt") -> None:
    """Refuse models that cannot be tuned by virtual tokens.

    Args:
        model: The model.
        kept: Modules that would be trained in full.
        kind: The adapter, for messages.

    Raises:
        RecipeError: The model cannot be tuned; the message says why.
    """
    name, cure = type(model).__name__, "adapter: lora"
    if not name.endswith(("ForCausalLM", "LMHeadModel")) or model.base_model is model:
        raise RecipeError(f"adapter: {kind} is for decoders that generate text, but this is a {name}", cure)
    if kept:
        raise RecipeError(f"adapter: {kind} trains only virtual tokens, but {kept[0]} is newly initialized", cure)


def attach_virtual_tokens(model: Any, num_tokens: int) -> None:
    """Add virtual tokens to a model in place; they start as the embeddings of randomly drawn tokens."""
    table = model.get_input_embeddings().weight
    if table.is_meta:
        weight = torch.empty(num_tokens, table.shape[1], device="meta")
    else:
        drawn = torch.randint(len(table), (num_tokens,))
        weight = table.detach()[drawn.to(table.device)].float()
    tokens = VirtualTokens(weight)
    setattr(model, VIRTUAL_MODULE, tokens)
    model.base_model.register_forward_pre_hook(tokens.before, with_kwargs=True)
    model.base_model.register_forward_hook(tokens.after)


def num_virtual_tokens_of(model: Any) -> int:
    """Number of positions that virtual tokens take in each row of a model."""
    tokens = getattr(model, VIRTUAL_MODULE, None)
    return 0 if tokens is None else len(tokens.weight)


def prompt_config(model: Any, num_tokens: int, base: tuple[str | None, str | None]) -> Any:
    """PEFT's config of virtual tokens."""
    from peft import PromptTuningConfig

    text = model.config.get_text_config()
    config = PromptTuningConfig(
        task_type="CAUSAL_LM",
        num_virtual_tokens=num_tokens,
        token_dim=model.get_input_embeddings().weight.shape[1],
        num_transformer_submodules=1,
        num_attention_heads=text.num_attention_heads,
        num_layers=text.num_hidden_layers,
        inference_mode=True,
    )
    config.base_model_name_or_path, config.revision = base
    return config
