"""Configs of transformers' architectures: what a default lacks to be built, and small ones that a CPU trains quickly.

`zoo.py` predicts default configs on `meta`, and trains small ones to find out what transformers itself can train.
"""

from typing import Any

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Defaults that transformers cannot build or train on 128 tokens, with the fewest settings that cure them.
MINIMAL: dict[str, dict[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},  # sparse attention needs 704 tokens
    "bigbird_pegasus": {"attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},  # none
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}},  # the default has none
    "deepseek_v2": {"num_experts_per_tok": 6, "moe_intermediate_size": 1408},  # None, and rows not aligned to 16 bytes
    "dots1": {"n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 4},  # None
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},  # None
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},  # all blocks are Mamba's
    "hunyuan_v1_dense": {"head_dim": 128},  # None
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},  # None
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},  # None
    "reformer": {"axial_pos_shape": [8, 16]},  # positions for 4,096 tokens, no more and no fewer
    "xmod": {"default_language": "en_XX"},  # None
}
MINIMAL_FOR_TASK: dict[tuple[str, str], dict[str, Any]] = {("reformer", "causal-lm"): {"is_decoder": True}}
_SMALL: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), 512),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embed_dim", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("attention_hidden_size", "lru_width", "embedding_size", "decoder_hidden_size"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "hidden_dim", "ffn_hidden_size"), 96),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size", "d_inner"), 96),
    **dict.fromkeys(("shared_expert_intermediate_size", "intermediate_size_mlp"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "n_layer_heads"), 4),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "v_head_dim"), 16),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k", "moe_topk"), 2),
}
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_LAYERS += ("num_decoder_layers", "num_encoder_layers", "num_hidden_layers_decoder")


def small_config(config: Any, num_layers: int) -> dict[str, Any]:
    """The settings that make a config small: few layers, narrow ones, a small vocabulary.

    Args:
        config: A config object of transformers, with its defaults.
        num_layers: Layers of every stack.
    """
    found: dict[str, Any] = {name: size for name, size in _SMALL.items() if _is_larger(config, name, size)}
    found |= {name: num_layers for name in _LAYERS if _is_larger(config, name, num_layers)}
    for name in getattr(config, "sub_configs", {}):
        inner = getattr(config, name, None)
        if inner is not None:
            found[name] = {"model_type": inner.model_type, **small_config(inner, num_layers)}
    return found


def few_layers(config: Any, num_layers: int) -> dict[str, Any]:
    """The settings that leave the widths of a config alone, for those that cannot be made narrow by rule."""
    found: dict[str, Any] = {name: num_layers for name in _LAYERS if _is_larger(config, name, num_layers)}
    if _is_larger(config, "vocab_size", 512):
        found["vocab_size"] = 512
    return found


def _is_larger(config: Any, name: str, size: int) -> bool:
    value = getattr(config, name, None)
    return type(value) is int and value > size
