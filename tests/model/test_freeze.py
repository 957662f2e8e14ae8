"""Freezing: frozen parameters do not change by a bit, and are unfrozen at the given step."""

import logging

import pytest
import torch

from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.errors import CheckpointError, RecipeError
from trimtab.model.freeze import Freezing
from trimtab.model.hub import quiet_transformers
from trimtab.model.load import load_model
from trimtab.units import Every, parse_every

HEAD = {"num_labels": 2}


def classifier():
    return load_model(config_of("bert"), "sequence-classification", HEAD, tokenizer())


def trainable(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def copies(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def train_one(model, optimizer):
    optimizer.zero_grad()
    model(**batch_of(TEXTS), labels=torch.tensor([0, 1, 0, 1, 1])).loss.backward()
    optimizer.step()


def test_base_until_a_step():
    """Weight decay and momentum must not move a frozen weight; afterwards its optimizer state begins afresh."""
    model = classifier()
    freezing = Freezing(model, {"base": parse_every("3 steps")})
    freezing.apply()
    assert trainable(model) == {"classifier.weight", "classifier.bias"}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    start = copies(model)
    for step in range(3):
        assert freezing.at_step(step, step / 10) == []
        train_one(model, optimizer)
        now = copies(model)
        assert {name for name in now if not torch.equal(now[name], start[name])} == trainable(model)
    assert freezing.at_step(3, 0.3) == ["base"]
    assert freezing.at_step(4, 0.4) == []
    assert trainable(model) == set(copies(model))
    train_one(model, optimizer)
    now = copies(model)
    assert not [name for name in now if torch.equal(now[name], start[name])]
    assert int(optimizer.state[model.bert.pooler.dense.weight]["step"]) == 1
    assert int(optimizer.state[model.classifier.weight]["step"]) == 4


def test_epochs_and_always():
    model = classifier()
    freezing = Freezing(model, {"bert.embeddings": None, "bert.encoder.layer.0": Every(None, 1.0, None)})
    freezing.apply()
    held = {name for name in copies(model) if name.startswith(("bert.embeddings", "bert.encoder.layer.0"))}
    assert trainable(model) == set(copies(model)) - held
    assert freezing.at_step(9, 9 / 10) == []
    assert freezing.at_step(10, sum([0.1] * 10)) == ["bert.encoder.layer.0"]  # 0.9999999999999999
    assert freezing.active == ["bert.embeddings"]
    assert freezing.at_step(10**9, 10**6) == []
    assert {name for name in held if "layer" in name} <= trainable(model)
    assert not {name for name in held if "embeddings" in name} & trainable(model)


def test_patterns():
    model = classifier()
    Freezing(model, {"*.bias": None}).apply()
    assert {name for name in copies(model) if not name.endswith(".bias")} == trainable(model)
    model = classifier()
    Freezing(model, {"*layer.[0-1].attention*": None}).apply()
    assert {name for name in copies(model) if ".attention." not in name} == trainable(model)


def test_a_parameter_is_unfrozen_with_its_last_pattern():
    model = classifier()
    freezing = Freezing(model, {"base": parse_every("2 steps"), "bert.embeddings": parse_every("5 steps")})
    freezing.apply()
    assert freezing.at_step(2, 0) == ["base"]
    assert trainable(model) == {name for name in copies(model) if "embeddings" not in name}
    assert freezing.at_step(5, 0) == ["bert.embeddings"]
    assert trainable(model) == set(copies(model))


def test_parameters_frozen_before_stay_frozen():
    model = classifier()
    model.bert.pooler.requires_grad_(False)
    freezing = Freezing(model, {"base": parse_every("1 step")})
    freezing.apply()
    freezing.at_step(1, 0)
    assert trainable(model) == {name for name in copies(model) if "pooler" not in name}


def test_remaining_gradients_are_dropped():
    model = classifier()
    train_one(model, torch.optim.SGD(model.parameters(), lr=0.1))
    Freezing(model, {"base": None}).apply()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == trainable(model)


def test_state_is_kept():
    spec = {"base": parse_every("2 steps"), "bert.embeddings": None}
    model = classifier()
    freezing = Freezing(model, spec)
    freezing.apply()
    freezing.at_step(2, 0)
    resumed_model = classifier()
    resumed = Freezing(resumed_model, spec)
    resumed.apply()
    assert trainable(resumed_model) != trainable(model)
    resumed.load_state_dict(freezing.state_dict())
    assert trainable(resumed_model) == trainable(model)
    assert resumed.at_step(3, 0) == []
    with pytest.raises(CheckpointError, match="classifier is frozen, which is not in train.freeze"):
        resumed.load_state_dict({"active": ["classifier"]})


def test_newly_initialized_parts_of_the_base_are_not_frozen(tmp_path, caplog):
    """A pooler that the checkpoint lacks is random: frozen, it would stay random."""
    with quiet_transformers():
        load_model(config_of("bert"), "masked-lm", {}, tokenizer()).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), "sequence-classification", HEAD, tokenizer())
    caplog.set_level(logging.INFO, logger="trimtab")
    Freezing(model, {"base": None}).apply()
    new = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert trainable(model) == {"classifier.weight", "classifier.bias"} | new
    assert "newly initialized" in caplog.messages[-1]


def test_tied_weights():
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer())
    Freezing(model, {"lm_head": None}).apply()  # its weight is that of the embeddings, and has their name
    assert "transformer.wte.weight" not in trainable(model)
    model = load_model(config_of("gpt2"), "causal-lm", {}, tokenizer())
    with pytest.raises(RecipeError, match="leaves no trainable parameters"):
        Freezing(model, {"base": None})


def test_mistakes():
    with pytest.raises(RecipeError, match="matches no module") as failure:
        Freezing(classifier(), {"bert.embedings": None})
    assert "bert.embeddings" in failure.value.cure
    with pytest.raises(RecipeError, match="matches no module") as failure:
        Freezing(classifier(), {"zzz": None})
    assert "classifier" in failure.value.cure
    with pytest.raises(RecipeError, match="has no head separate from its base") as failure:
        Freezing(load_model(config_of("t5"), "seq2seq-lm", {}, tokenizer()), {"base": None})
    assert "encoder" in failure.value.cure
    with pytest.raises(RecipeError, match="the speed of the machine"):
        Freezing(classifier(), {"base": parse_every("10min")})


def test_nothing_frozen():
    model = classifier()
    freezing = Freezing(model, {})
    freezing.apply()
    assert freezing.at_step(1, 1) == []
    assert trainable(model) == set(copies(model))
