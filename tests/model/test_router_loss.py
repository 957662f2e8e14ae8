"""Mixture-of-experts models: the auxiliary router loss is part of the loss, as in transformers."""

import pytest
import torch

from library_versions import skip_before
from tiny_models import TEXTS, batch_of, tokenizer
from trimtab.data.metrics import Metrics
from trimtab.engine.engine import Engine
from trimtab.errors import LossError
from trimtab.model import router_loss as router_loss_module
from trimtab.model.chunked_loss import check_chunked_loss
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model
from trimtab.techniques.chunked_loss import build_task_loss as build_loss
from trimtab.techniques.recomputation import checkpoint_layers
from trimtab.training.evaluate import Evaluator
from trimtab.training.step import window_gradients

_SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
_SMALL |= {"intermediate_size": 48, "max_position_embeddings": 64, "num_experts_per_tok": 2}
_SHARED = {"moe_intermediate_size": 24, "router_aux_loss_coef": 0.5}
MODELS = {
    "mixtral": {**_SMALL, "num_local_experts": 4, "router_aux_loss_coef": 0.5},
    "qwen2_moe": {**_SMALL, **_SHARED, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**_SMALL, **_SHARED, "num_experts": 4},
    "olmoe": {**_SMALL, "num_experts": 4, "router_aux_loss_coef": 0.5},
    "gpt_oss": {**_SMALL, "num_local_experts": 4, "router_aux_loss_coef": 0.5, "head_dim": 16},
    "jetmoe": {
        **{key: value for key, value in _SMALL.items() if key != "num_attention_heads"},
        "kv_channels": 8,
        "num_local_experts": 4,
        "aux_loss_coef": 0.5,  # another name
    },
}
_PAIR = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2}
_PAIR |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64}


def a_model(name="mixtral", **changes):
    torch.manual_seed(3)
    config = {"model_type": name, "output_router_logits": True, **MODELS[name], **changes}
    return load_model(config, "causal-lm", {}, tokenizer()).eval()


def token_batch(texts=TEXTS):
    batch = batch_of(texts)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def gradients_of(model, loss):
    model.zero_grad(set_to_none=True)
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(ours, theirs):
    """Up to a few roundings of values of the size of the largest one."""
    assert ours.keys() == theirs.keys()
    size = max(float(gradient.abs().max()) for gradient in theirs.values())
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=32 * torch.finfo().eps * size, msg=name)


@pytest.mark.parametrize("how", ["plain", "chunked"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_loss_of_transformers(name, how):
    if name == "jetmoe":
        skip_before("5.22", "returns the router loss of JetMoE only if it is called with labels")
    model, batch = a_model(name), token_batch()
    step = build_loss("token-cross-entropy", shifts_labels=True, how=how)(model, batch)
    ours = gradients_of(model, step.value)
    with quiet_transformers():
        outputs = model(**batch)
    theirs = gradients_of(model, outputs.loss)
    torch.testing.assert_close(step.value, outputs.loss, rtol=16 * torch.finfo().eps, atol=0)
    assert_same(ours, theirs)
    tokens_alone = outputs.loss - 0.5 * outputs.aux_loss
    torch.testing.assert_close(step.item_loss_sum() / step.weight, tokens_alone.detach())
    assert step.loss_sum() - step.item_loss_sum() > 0.5 * step.weight  # the loss of the routers is at least 1


def test_a_head_whose_loss_is_chunked_is_still_recognised():
    assert check_chunked_loss(a_model(), token_batch()) is None


def test_no_router_loss_unless_the_config_requests_it():
    model, batch = a_model(output_router_logits=False), token_batch()
    step = build_loss("token-cross-entropy", shifts_labels=True)(model, batch)
    assert step.item_mean is None
    torch.testing.assert_close(step.value, model(**batch).loss, rtol=16 * torch.finfo().eps, atol=0)


@pytest.mark.parametrize("how", ["plain", "chunked"])
@pytest.mark.parametrize("mode", ["all", "ops"])
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_gradients_reach_the_routers_through_recomputed_layers(name, implementation, mode, how):
    """A recomputed block calls its router again, whose logits count once."""
    model, batch = a_model(name, router_jitter_noise=0.1) if name == "mixtral" else a_model(name), token_batch()
    model.set_experts_implementation(implementation)
    torch.manual_seed(0)
    expected = gradients_of(model.train(), build_loss("token-cross-entropy", shifts_labels=True)(model, batch).value)
    checkpoint_layers(model, mode)
    torch.manual_seed(0)
    loss = build_loss("token-cross-entropy", shifts_labels=True, how=how)
    assert_same(gradients_of(model, loss(model, batch).value), expected)


def test_micro_batches_weigh_the_loss_of_routers_by_their_tokens():
    """It is not additive over rows; the loss is its mean over the micro-batches, weighted by tokens."""
    model = a_model().train()
    parts = [token_batch(TEXTS[:1]), token_batch(TEXTS[1:])]
    num_tokens = [int((part["labels"][:, 1:] != -100).sum()) for part in parts]
    with quiet_transformers():
        losses = [model(**part).loss for part in parts]
    expected = sum(loss * count for loss, count in zip(losses, num_tokens, strict=True)) / sum(num_tokens)
    theirs = gradients_of(model, expected)
    model.zero_grad(set_to_none=True)
    engine = Engine(device="cpu")
    model, _ = engine.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loss = build_loss("token-cross-entropy", shifts_labels=True)
    result = window_gradients(engine, model, loss, parts, len(parts), None)
    assert_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, theirs)
    torch.testing.assert_close(result.loss_sum / result.weight, expected.detach())


def test_metrics_of_an_evaluation_are_those_of_the_tokens():
    """However rows are cut into batches."""
    model, engine = a_model(), Engine(device="cpu")
    loss = build_loss("token-cross-entropy", shifts_labels=True)
    found = []
    for batches in ([token_batch()], [token_batch(TEXTS[:2]), token_batch(TEXTS[2:])]):
        evaluator = Evaluator(engine, batches, loss, lambda: Metrics("token-cross-entropy", shifts_labels=True))
        found.append(evaluator.run(model))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    model.config.output_router_logits = False
    assert found[0]["loss"] == pytest.approx(float(model(**token_batch()).loss.detach()), rel=1e-5)


def test_a_model_that_returns_its_router_loss_only_with_labels_is_refused():
    config = {**_PAIR, "model_type": "nllb-moe", "num_experts": 4, "encoder_sparse_step": 1, "decoder_sparse_step": 1}
    model = load_model({**config, "output_router_logits": True}, "seq2seq-lm", {}, tokenizer()).eval()
    batch = token_batch()
    batch["decoder_input_ids"] = batch["input_ids"]
    for how in ("plain", "chunked"):
        with pytest.raises(LossError, match="NllbMoe.* requests the auxiliary loss .*\n  cure: set output_router_"):
            build_loss("token-cross-entropy", how=how)(model, batch)
    model.config.output_router_logits = False
    assert build_loss("token-cross-entropy")(model, batch).item_mean is None


def test_a_loss_without_a_known_coefficient_is_refused():
    class Unknown(torch.nn.Module):
        def forward(self, **inputs):
            return {"logits": torch.zeros(2, 3), "aux_loss": torch.ones(())}

    with pytest.raises(LossError, match="Unknown returns aux_loss, but has no coefficient for it in router_aux_loss"):
        build_loss("cross-entropy")(Unknown(), {"labels": torch.tensor([0, 1])})


def test_a_router_loss_without_effect_is_reported(monkeypatch):
    lines = []
    monkeypatch.setattr(router_loss_module, "log_info_once", lines.append)
    config = {"model_type": "mixtral", "output_router_logits": True, **MODELS["mixtral"]}
    model = load_model(config, "sequence-classification", {"num_labels": 2}, tokenizer()).eval()
    batch = {**batch_of(TEXTS), "labels": torch.tensor([0, 1, 0, 1, 1])}
    step = build_loss("cross-entropy")(model, batch)
    torch.testing.assert_close(step.value, model(**batch).loss, rtol=16 * torch.finfo().eps, atol=0)
    assert lines == [
        "MixtralForSequenceClassification has no auxiliary loss for its routers: output_router_logits has no effect on "
        "its training"
    ]
