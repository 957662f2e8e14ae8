"""Tiny mixtures of experts, shaped like Mixtral, Qwen3-MoE and gpt-oss, and rows for them."""

import torch

from tiny_models import TEXTS, batch_of, tokenizer
from trimtab.model.load import load_model

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
_SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64, "num_experts_per_tok": 2}
_ROUTED = {"moe_intermediate_size": 24, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
_ROUTED |= {"first_k_dense_replace": 1, "num_key_value_heads": 2}
CONFIGS = {
    "mixtral": {**_SMALL, "num_local_experts": 4, "router_aux_loss_coef": 0.5},
    "qwen3_moe": {**_SMALL, "num_experts": 4, "moe_intermediate_size": 24, "router_aux_loss_coef": 0.5},
    "gpt_oss": {**_SMALL, "num_local_experts": 4, "router_aux_loss_coef": 0.5, "head_dim": 16},
    "phimoe": {**_SMALL, "num_local_experts": 4},
    "glm4_moe": {**_SMALL, **_ROUTED, "head_dim": 16},  # a dense block and a shared expert
}
SHAPES = ("mixtral", "qwen3_moe", "gpt_oss")
# Those of transformers that run on a CPU. With eager, an expert without tokens is not computed at all.
IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")


def moe_config(name="mixtral", **changes):
    return {"model_type": name, **CONFIGS[name], **changes}


def moe_model(name="mixtral", implementation="grouped_mm", **changes):
    torch.manual_seed(3)
    model = load_model(moe_config(name, **changes), "causal-lm", {}, tokenizer())
    model.set_experts_implementation(implementation)
    return model


def token_batch(texts=TEXTS):
    batch = batch_of(texts)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}
