"""Grouped-query attention where the flash kernel does not run: on GPUs before Ampere, and in fp32.

transformers passes keys and values with fewer heads to scaled_dot_product_attention (enable_gqa). Only the flash kernel
supports that; otherwise torch falls back to the math kernel, whose memory grows with the square of the length. With the
heads repeated first, the memory-efficient kernel runs, at the cost of copies of keys and values.
"""

from types import SimpleNamespace
from typing import Any

import torch

_NAME = "trimtab_sdpa_repeated_heads"
_FLASH_CAPABILITY = (8, 0)


def flash_runs(capability: tuple[int, int], compute_dtype: torch.dtype | None) -> bool:
    """Whether the flash kernel runs on a GPU with a dtype; None for fp32."""
    return compute_dtype is not None and capability >= _FLASH_CAPABILITY


def repeat_heads(model: Any) -> bool:
    """Let a model repeat the key and value heads before scaled_dot_product_attention.

    Args:
        model: A transformers model.

    Returns:
        Whether the model was changed: only if it has grouped heads and its attention implementation is "sdpa".
    """
    grouped = any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())
    if not grouped or getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, _attention)
    AttentionMaskInterface.register(_NAME, sdpa_mask)  # otherwise transformers would pass no mask
    model.set_attn_implementation(_NAME)
    return True


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    groups = getattr(module, "num_key_value_groups", 1)
    plain: Any = SimpleNamespace(is_causal=getattr(module, "is_causal", True), num_key_value_groups=1)
    return sdpa_attention_forward(
        plain, query, repeat_kv(key, groups), repeat_kv(value, groups), attention_mask, **kwargs
    )
