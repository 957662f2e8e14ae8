"""Configs of tiny models of common architectures, and a tokenizer for them."""

import copy
import os
from functools import cache
from pathlib import Path

import pytest
import torch

from trimtab.model.load import train_tokenizer

STORIES = Path(os.environ.get("TRIMTAB_TEST_DATA", "nowhere")) / "models/stories260k-llama"
needs_stories = pytest.mark.skipif(
    not STORIES.is_dir(), reason="TRIMTAB_TEST_DATA names no folder with models/stories260k-llama, a Llama of 260k"
)

TEXTS = [
    "the cat sat on the mat",
    "a dog ran after the cat",
    "what a great film it was",
    "the worst film that I ever saw",
    "Grüße aus Köln, 5 € the piece",
]
_BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
_PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
_PAIR |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}

CONFIGS = {
    "bert": {"model_type": "bert", "max_position_embeddings": 64, **_BERT},
    "roberta": {"model_type": "roberta", "max_position_embeddings": 66, **_BERT},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "llama": {"model_type": "llama", "max_position_embeddings": 64, "num_key_value_heads": 1, **_BERT},
    "t5": {"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2},
    "marian": {"model_type": "marian", **_PAIR},
    "bart": {"model_type": "bart", **_PAIR},
    "encoder-decoder": {
        "model_type": "encoder-decoder",
        "encoder": {"model_type": "bert", "max_position_embeddings": 48, **_BERT},
        "decoder": {"model_type": "bert", "max_position_embeddings": 64, **_BERT},
    },
}
KINDS = {  # a head that each shape is trained with
    "bert": "sequence-classification",
    "roberta": "masked-lm",
    **dict.fromkeys(("gpt2", "llama"), "causal-lm"),
    **dict.fromkeys(("t5", "marian", "bart", "encoder-decoder"), "seq2seq-lm"),
}


def config_of(name: str) -> dict:
    return copy.deepcopy(CONFIGS[name])


@cache
def _tokenizer():
    return train_tokenizer(TEXTS, 300)


def tokenizer():
    return copy.deepcopy(_tokenizer())


def batch_of(texts, tok=None, side="right"):
    """Texts as a padded batch."""
    tok = tok or tokenizer()
    return dict(tok(texts, padding=True, return_tensors="pt", padding_side=side))


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
