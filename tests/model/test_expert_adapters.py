"""LoRA on fused expert weights: agreement with PEFT, files, merging, and what is refused or reported."""

import copy
import json
import logging
import warnings

import pytest
import torch

from rounding import assert_same_up_to_rounding
from tiny_adapters import shake
from tiny_experts import IMPLEMENTATIONS, SHAPES, moe_model, token_batch
from tiny_models import config_of, tokenizer
from trimtab.commands.merge import merge_in_place
from trimtab.errors import RecipeError
from trimtab.model.adapters import LoraSpec, add_adapter, load_adapter
from trimtab.model.load import load_model

SPEC = LoraSpec(rank=2, experts=True, ranks={"*.experts.down_proj": 3})


def adapted(base, spec=SPEC):
    model = copy.deepcopy(base)
    adapter = add_adapter(model, spec)
    shake(adapter)
    return model.eval(), adapter


def outcome(model):
    model.zero_grad()
    output = model(**token_batch())
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return output.logits.detach(), gradients


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", SHAPES)
def test_peft_and_our_loader_read_the_folder(name, implementation, tmp_path):
    import peft

    base = moe_model(name, implementation).eval()
    model, adapter = adapted(base)
    adapter.save(tmp_path)
    stored = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(stored["target_parameters"]) == {"experts.gate_up_proj", "experts.down_proj"}
    logits, gradients = outcome(model)
    assert all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert (logits - base(**token_batch()).logits).abs().max() > 0.01
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys did not match")  # but do match
        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path, is_trainable=True).eval()
    their_logits, their_gradients = outcome(theirs)
    assert_same_up_to_rounding(logits, their_logits, num_roundings=64)
    plain = {key.removeprefix("base_model.model."): gradient for key, gradient in their_gradients.items()}
    assert plain.keys() == gradients.keys()
    size = max(float(gradient.abs().max()) for gradient in plain.values())
    for key, gradient in gradients.items():
        assert_same_up_to_rounding(gradient, plain[key], num_roundings=64, size=size)
    loaded = copy.deepcopy(base)
    assert load_adapter(loaded, tmp_path).targets == adapter.targets
    assert torch.equal(loaded.eval()(**token_batch()).logits, logits)


@pytest.mark.parametrize("name", SHAPES)
def test_merged(name):
    base = moe_model(name)
    model, adapter = adapted(base)
    logits, _ = outcome(model)
    model.requires_grad_(False)
    merge_in_place(model, adapter, torch.float32)
    assert dict(model.named_parameters()).keys() == dict(base.named_parameters()).keys()
    assert_same_up_to_rounding(model(**token_batch()).logits, logits, num_roundings=64)


def test_shapes_and_counts(caplog):
    caplog.set_level(logging.INFO, logger="trimtab")
    _, adapter = adapted(moe_model("mixtral"))
    # of 4 experts: gate_up_proj is 96 x 32, down_proj 32 x 48; q, k, v and o are 32, 16, 16 and 32 rows of 32
    experts = 4 * (2 * (96 + 32) + 3 * (32 + 48))
    attention = 2 * (2 * (32 + 32) + 2 * (16 + 32))
    assert adapter.num_parameters == 2 * (experts + attention)
    (line,) = [message for message in caplog.messages if "trainable parameters" in message]
    assert "LoRA of rank 2 to 3 on 8 modules and 4 fused expert weights" in line
    assert not any("leaves out" in message for message in caplog.messages)


def test_layers_and_whole_modules_limit_them():
    _, adapter = adapted(moe_model(), LoraSpec(rank=2, experts=True, layers=(1, 1)))
    assert {name.split(".")[2] for name in adapter.targets} == {"1"}
    _, adapter = adapted(moe_model(), LoraSpec(rank=2, experts=True, trains=["model.layers.0.mlp"]))
    assert {name.split(".")[2] for name in adapter.targets if "experts" in name} == {"1"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dropout": 0.1}, "adapter.dropout is 0.1, which adapters on fused experts do not support"),
        ({"dora": True}, "adapter.dora is True"),
        ({"init": "pissa"}, "adapter.init is 'pissa'"),
    ],
)
def test_refused_settings(settings, problem):
    with pytest.raises(RecipeError, match=problem):
        LoraSpec(experts=True, **settings)


def test_refused_without_experts():
    model = load_model(config_of("llama"), "causal-lm", {}, tokenizer())
    with pytest.raises(RecipeError, match="adapter.experts: LlamaForCausalLM has no fused expert weights"):
        add_adapter(model, LoraSpec(experts=True))


def test_a_router_that_is_a_linear_module_gets_no_adapter():
    """PhiMoE's returns the chosen experts."""
    model, adapter = adapted(moe_model("phimoe"), LoraSpec(rank=2))
    assert not any("router" in name for name in adapter.targets)
    outcome(model)


@pytest.mark.parametrize("experts", [False, True])
def test_linear_modules_named_like_experts_keep_their_adapters(experts, tmp_path, caplog):
    """PEFT would apply an adapter on shared experts and dense blocks to the experts; it is told not to."""
    caplog.set_level(logging.INFO, logger="trimtab")
    base = moe_model("glm4_moe")
    model, adapter = adapted(base, LoraSpec(rank=2, experts=experts))
    assert {"model.layers.0.mlp.down_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= set(adapter.targets)
    assert sum(name.count(".mlp.experts") for name in adapter.targets) == 2 * experts
    assert any("PEFT would load down_proj, gate_proj, up_proj as adapters of experts" in m for m in caplog.messages)
    logits, _ = outcome(model)
    adapter.save(tmp_path)
    loaded = copy.deepcopy(base)
    assert load_adapter(loaded, tmp_path).targets == adapter.targets
    assert torch.equal(loaded.eval()(**token_batch()).logits, logits)
