"""The zoo: every pair of an architecture and a task that transformers registers, shrunk to about 100,000 weights.

`shrunk(model_type)` gives the settings of a small model that has every part of the default one: each kind of layer, at
least two experts, the same ratio of heads. Names of settings decide, so most new architectures need no line here.
"""

import dataclasses
import re
from functools import cache

TASKS = {  # task of a recipe: the auto class, and the table of transformers that lists its architectures
    "causal-lm": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "classify": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "masked-lm": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
WIDTH, HEADS, HEAD, LAYERS = 64, 4, 16, 2
POSITIONS = 128  # more than the longest row, with room for generated tokens

# Settings by the form of their names. The first pattern that matches a whole name decides.
_LAYERS = r"(num_)?(hidden|encoder|decoder)_layers|n_layers?|num_layers|num_blocks|num_layers_per_stack"
_SIZES = (
    (_LAYERS, LAYERS),
    (r"(num|n)_(attention_|self_attention_|cross_attention_)?heads?|(encoder|decoder)_attention_heads", HEADS),
    (r"num_(encoder|decoder)_attention_heads|swa_num_attention_heads|attention_heads", HEADS),
    (r"(swa_)?num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups", HEADS // 2),
    (r"(swa_)?head_dim|d_kv|d_head|dim_head|attention_head_size|kv_channels|v_head_dim|index_head_dim", HEAD),
    (r"qk_nope_head_dim|qk_rope_head_dim|rotary_dim", HEAD // 2),
    (r"hidden_size|d_model|n_embd|dim|attention_hidden_size|word_embed_proj_dim|lru_width|input_embedding_size", WIDTH),
    (r"output_embedding_size|prediction_head_size|d_latents|hidden_size_global|pooler_hidden_size", WIDTH),
    (r"(moe_|shared_expert_|moe_shared_expert_|dense_)?intermediate_size(_mlp)?", WIDTH),
    (r"(encoder_|decoder_|expert_)?ffn_(dim|hidden_size)|d_ff|dff|d_inner|hidden_dim|dim_ff|feed_forward_size", WIDTH),
    (r"(kv|q|o)_lora_rank|embedding_size|embedding_dim|laurel_rank|hc_lowrank|router_hidden_size", WIDTH // 2),
    (r"num_experts|num_local_experts|n_routed_experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k", 2),
    (r"linear_num_(key|value)_heads|linear_num_heads|mamba_(n|num)_heads|index_n_heads", HEADS),
    (r"linear_(key_|value_)?head_dim|mamba_d_head|mamba_head_?dim", HEAD),
    (r"mamba_d_state|state_size|ssm_state_size|mamba_dt_rank|time_step_rank", 8),
    (r"(local_attention|sliding_window(_size)?|attention_window(_size)?|attention_chunk_size|window_size)", 8),
    (r"(mamba_)?chunk_size|index_topk|index_block_size|keep_window_size", 8),
    (r"max_(source_|target_|encoder_|decoder_)?position(s|_embeddings)|n_positions|n_ctx|max_seq_len", POSITIONS),
    (r"model_max_length|max_(encoder|decoder)_position_embeddings|context_length|mem_len", POSITIONS),
    (r"max_window_layers|first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_group|topk_group", 1),
    (r"num_expert_group", 1),
    (r"n_groups", 2),
    (r"moe_layer_end_index", LAYERS - 1),
    (r"num_sparse_(encoder|decoder)_layers|(encoder|decoder)_sparse_step", 1),
    (r"(vocab_size_per_layer_input|(src|tgt|decoder)_vocab_size)", "vocabulary"),
    (r"hidden_size_per_layer_input|adapter_rank|gated_norm_rank", 8),
)


def pairs(tasks=tuple(TASKS)):
    """All (model type, task) that transformers registers, in its order."""
    from transformers.models.auto import modeling_auto

    return [(model, task) for task in tasks for model in getattr(modeling_auto, TASKS[task][1])]


@cache
def shrunk(model_type, vocabulary=300):
    """Settings of a small model of a type, as `model.config` of a recipe takes them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    start = _STARTS.get(model_type, {})
    settings = {"model_type": model_type, **_small(CONFIG_MAPPING[model_type](**start), vocabulary)}
    return _merged(settings, _EXCEPTIONS.get(model_type, {}))


def _small(config, vocabulary):
    names = {field.name for field in dataclasses.fields(config)}
    # not getattr, which a config with settings for single layers refuses; some names stand for others
    found = {name: vars(config).get(config.attribute_map.get(name, name)) for name in sorted(names)}
    values = {name: value for name, value in found.items() if value is not None}
    small = {"head_dim": HEAD} if "head_dim" in names and "head_dim" not in values else {}
    small |= {"vocab_size": vocabulary} if "vocab_size" in names else {}
    layers = _kept_layers(values)
    for name, value in values.items():
        if dataclasses.is_dataclass(value) and hasattr(value, "model_type"):
            small[name] = {"model_type": value.model_type, **_small(value, vocabulary)}
        elif name in layers.lists:
            small[name] = [_size(name, value[number], values, vocabulary) for number in layers.numbers]
        elif isinstance(value, int) and not isinstance(value, bool):
            found = _size(name, value, values, vocabulary)
            found = max(found, len(layers.numbers)) if re.fullmatch(_LAYERS, name) else found
            if found < value:
                small[name] = found
    return small


@dataclasses.dataclass(frozen=True)
class _Layers:
    """Layers that a small model keeps, and the settings that have a value for each layer."""

    numbers: list[int]
    lists: set[str]


def _kept_layers(values):
    """The first two layers, and every first layer of a kind."""
    counts = {value for name, value in values.items() if re.fullmatch(_LAYERS, name)}
    is_list = {name: isinstance(value, list | tuple) and len(value) > 2 for name, value in values.items()}
    lists = {name: list(values[name]) for name in values if is_list[name] and len(values[name]) in counts}
    indices = {name for name, value in lists.items() if value == list(range(len(value)))}
    lists = {name: value for name, value in lists.items() if name not in indices}  # they number all layers
    kept, seen = [], set()
    for number in range(max(map(len, lists.values()), default=0)):
        kinds = {(name, str(value[number])) for name, value in lists.items() if number < len(value)}
        if number < LAYERS or kinds - seen:
            kept.append(number)
        seen |= kinds
    return _Layers(kept, set(lists))


def _size(name, value, values, vocabulary):
    if re.fullmatch(r"\w*token_(id|index)|tag_pad_id", name) and isinstance(value, int):
        return value if value < vocabulary else vocabulary - 1
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name.removesuffix("_per_layer")):
            if size == "vocabulary":
                return vocabulary
            if "key_value" in name and value == values.get(name.replace("key_value", "attention")):
                return HEADS
            return size
    return value


def _merged(settings, changes):
    merged = dict(settings)
    for name, value in changes.items():
        both = isinstance(value, dict) and isinstance(merged.get(name), dict)
        merged[name] = _merged(merged[name], value) if both else value
    return {name: value for name, value in merged.items() if value is not ...}


# What names alone do not tell: settings that depend on each other, and defaults that transformers cannot build.
_STARTS = {  # arguments without which the default config cannot even be made
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
}
_MAMBA = {"mamba_d_head": 2 * HEAD}  # heads times their size is twice the width
_GEMMA4 = {"global_head_dim": 2 * HEAD, "num_kv_shared_layers": 0}
_QWEN4 = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 8}
_QWEN4 |= {"indexer_compress_ratio": 2}
_AUDIO = {"num_filters": 2, "depths": [1, 1, 1, 1, 1, 1, 1]}
_XLM = {"emb_dim": WIDTH, "n_langs": 1}
_EXCEPTIONS = {
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "flaubert": _XLM,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_text": _GEMMA4,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hrm_text": {"num_layers_per_stack": ...},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "layoutlmv3": {"coordinate_size": 12, "shape_size": 8},
    "lfm2": {"block_multiple_of": 16, "layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lilt": {"hidden_size": 48, "intermediate_size": 48},
    "longcat_flash": {"head_dim": HEAD // 2},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 2 * HEADS},
    "nemo_speechlm": {"audio_config": {"diarization_config": {"head_config": {"audio_hidden_size": WIDTH}}}},
    "nemotron": {"num_key_value_heads": HEADS // 2},
    "nemotron_h": {"mamba_head_dim": 2 * HEAD},
    "perceiver": {"num_self_attends_per_block": 2, "num_latents": 8, "d_model": WIDTH},
    "qwen3_5": {"text_config": {"pad_token_id": 1}},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "roc_bert": {"shape_vocab_size": 300, "pronunciation_vocab_size": 300, "shape_embed_dim": 16},
    "squeezebert": {"embedding_size": WIDTH},
    "vibevoice_asr": {"acoustic_tokenizer_encoder_config": _AUDIO, "semantic_tokenizer_encoder_config": _AUDIO},
    "xlm": _XLM,
    "xlstm": {"embedding_dim": WIDTH, "chunk_size": ...},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4}
    | {"attention_hidden_size": 2 * WIDTH, "attention_head_dim": 2 * HEAD},
}

_CAUSAL = "gpt2 gpt_neox opt llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next gemma gemma2 gemma3_text"
_CAUSAL += " gemma4_text phi phi3 phimoe falcon bloom mpt starcoder2 olmo2 olmoe granite cohere2 deepseek_v2"
_CAUSAL += " deepseek_v3 gpt_oss glm4 glm4_moe smollm3 mamba2 nemotron stablelm"
_ENCODERS = "bert roberta distilbert electra albert deberta-v2 modernbert xlm-roberta mpnet longformer"
_SEQ2SEQ = "t5 mt5 umt5 bart mbart pegasus m2m_100 marian led switch_transformers"
# The models that people fine-tune most, each with the task it is known for.
NAMED = [
    *((model, "classify") for model in _ENCODERS.split()),
    *((model, "masked-lm") for model in _ENCODERS.split()),
    *((model, "causal-lm") for model in _CAUSAL.split()),
    *((model, "seq2seq") for model in _SEQ2SEQ.split()),
]
# Pairs that are also killed and resumed: encoders, decoders, experts, recurrent layers, encoder-decoders.
KILLED = [
    *(("bert", "classify"), ("roberta", "masked-lm"), ("gpt2", "causal-lm"), ("llama", "causal-lm")),
    *(("gemma3_text", "causal-lm"), ("mixtral", "causal-lm"), ("qwen3_next", "causal-lm"), ("mamba2", "causal-lm")),
    *(("t5", "seq2seq"), ("bart", "seq2seq")),
]
