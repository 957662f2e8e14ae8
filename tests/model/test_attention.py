"""Repeated key and value heads: the same results, other shapes for scaled_dot_product_attention."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from tiny_models import config_of, tokenizer
from trimtab.model.grouped_heads import flash_runs, repeat_heads
from trimtab.model.load import load_model


def small(kind="llama", **more):
    """A model with two query heads and one key-value head."""
    return load_model({**config_of("llama"), "model_type": kind, **more}, "causal-lm", {}, tokenizer())


def results(model, padded: bool):
    ids = torch.arange(24).view(2, 12) % 90
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 7:] = 0
    output = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    model.zero_grad()
    output.loss.backward()
    return output.logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_repeated_heads_give_the_same_results(kind, padded):
    model = small(kind)
    repeated = copy.deepcopy(model)
    assert repeat_heads(repeated)
    wanted, wanted_gradients = results(model, padded)
    found, gradients = results(repeated, padded)
    assert torch.allclose(found, wanted, atol=1e-6)
    for name, gradient in wanted_gradients.items():
        assert torch.allclose(gradients[name], gradient, atol=1e-6), name


def test_torch_is_given_as_many_key_heads_as_query_heads(monkeypatch):
    seen = []
    real = torch.nn.functional.scaled_dot_product_attention

    def watching(query, key, value, **kwargs):
        seen.append((query.shape[1], key.shape[1], value.shape[1], kwargs.get("enable_gqa", False)))
        return real(query, key, value, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watching)
    model = small()
    results(model, False)
    assert seen
    assert all(keys == 1 and grouped for _, keys, _, grouped in seen)
    seen.clear()
    repeat_heads(model)
    results(model, False)
    assert seen
    assert all(found == (2, 2, 2, False) for found in seen)


def test_models_without_grouped_heads_are_not_changed():
    model = small(num_key_value_heads=2)
    assert not repeat_heads(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_saved_model_does_not_mention_the_implementation(tmp_path):
    model = small()
    assert repeat_heads(model)
    model.save_pretrained(tmp_path)
    assert "trimtab" not in (tmp_path / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config._attn_implementation == "sdpa"


def test_flash_needs_half_precision_and_ampere():
    assert flash_runs((8, 0), torch.bfloat16)
    assert flash_runs((9, 0), torch.float16)
    assert not flash_runs((7, 5), torch.float16)
    assert not flash_runs((9, 0), None)
