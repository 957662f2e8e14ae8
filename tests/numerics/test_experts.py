"""Mixtures of experts with the techniques of a recipe: the losses and weights of the plain step."""

import pytest
import torch

from tiny_runs import Watch, lines_of, reviews, same_bits
from trimtab import Recipe, fit
from trimtab.model.load import load_model

pytestmark = pytest.mark.usefixtures("own_folder")
ROWS, HELD_OUT = reviews(24), reviews(8, first=1000)
# 16 experts in each of two layers for about 30 tokens of a batch: some get none
EXPERTS = {"model_type": "mixtral", "num_local_experts": 16, "num_experts_per_tok": 1, "num_hidden_layers": 2}
NUM_STEPS = 3


@pytest.fixture(scope="module")
def train(tiny, tmp_path_factory):
    """Trains a tiny Mixtral; keywords are sections of the recipe. Returns its weights after each step, and losses."""
    found = {}

    def train(has_router_loss=True, **sections):
        key = str((has_router_loss, sections))
        if key in found:
            return found[key]
        watch, settings = Watch(), {"max_steps": NUM_STEPS, "batch_size": 4, "lr": 1e-2, "optimizer": "sgd"}
        recipe = Recipe(
            model=tiny.folder("llama", output_router_logits=has_router_loss, router_aux_loss_coef=0.1, **EXPERTS),
            task="causal-lm",
            data={"train": ROWS, "eval": HELD_OUT, "text": "text"},
            train=settings | {"log_every": 1} | sections.pop("train", {}),
            out=str(tmp_path_factory.mktemp("run")),
            **sections,
        )
        result = fit(recipe, callbacks=[watch], progress="quiet", device="cpu")
        losses = [line["loss"] for line in lines_of(result.folder) if "loss" in line]
        found[key] = watch.weights, losses
        return found[key]

    return train


def assert_same_run(found, expected, num_roundings=64):
    (weights, losses), (their_weights, their_losses) = found, expected
    assert len(losses) == NUM_STEPS
    assert losses == pytest.approx(their_losses, rel=num_roundings * torch.finfo().eps)
    for name, value in their_weights[-1].items():
        size = max(1.0, float(value.abs().max()))
        assert (weights[-1][name] - value).abs().max() <= num_roundings * torch.finfo().eps * size, name


CASES = {
    "recomputed": {"gradient_checkpointing": "all"},
    "recomputed but products": {"gradient_checkpointing": "ops"},
    "offloaded": {"offload_activations": "all"},
    "chunked loss": {"loss": "chunked"},
    "updated on the host": {"update": "host"},
    "without padding": {"padding": "none"},
}
QUICK = ("recomputed", "without padding")


@pytest.mark.parametrize("case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES])
def test_the_plain_step(train, case):
    """With the auxiliary loss of the routers, and clipping."""
    assert_same_run(train(memory=CASES[case]), train())


@pytest.mark.slow
def test_updated_in_backward(train):
    settings = {"train": {"max_grad_norm": None, "optimizer": "adamw", "weight_decay": 0.1}}
    plain, _ = train(**settings)
    weights, _ = train(**settings, memory={"update": "in-backward"})
    assert all(same_bits(*pair) for pair in zip(weights, plain, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("memory", [{"micro_batch": 1}, {"micro_batch": 3, "padding": "none"}])
def test_micro_batches(train, memory):
    """Without a router loss, which is not a mean over tokens, the split changes nothing."""
    assert_same_run(train(False, memory=memory), train(False))


@pytest.mark.slow
def test_frozen_experts(train):
    weights, _ = train(train={"freeze": {"*.experts": "always"}})
    for name, value in weights[-1].items():
        assert torch.equal(value, weights[0][name]) == (".experts." in name), name


@pytest.mark.slow
@pytest.mark.parametrize("update", ["in-backward", "host"])
def test_experts_without_gradients(tiny, tmp_path, update):
    """Switch has a module for each expert: one without tokens has no gradient, and is left as it is."""
    experts = {"num_experts": 16, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    names = {"model_type": "switch_transformers", "num_decoder_layers": 1, "dropout_rate": 0.0}
    found = []
    for how in ("device", update):
        recipe = Recipe(
            model=tiny.folder("t5", router_jitter_noise=0.0, **names, **experts),
            task="seq2seq",
            data={"train": ROWS, "eval": HELD_OUT, "text": "text", "target": "label"},
            train={"max_steps": 2, "batch_size": 2, "lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": None},
            memory={"update": how},
            out=str(tmp_path / how),
        )
        watch = Watch()
        fit(recipe, callbacks=[watch], progress="quiet", device="cpu")
        found.append(watch.weights)
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
    start = load_model(tiny.folder("t5", router_jitter_noise=0.0, **names, **experts), "seq2seq-lm", {}, None)
    stayed = [n for n, p in start.named_parameters() if torch.equal(p, found[0][-1][n])]
    assert stayed
    assert all(".experts." in name for name in stayed)
