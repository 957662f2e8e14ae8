"""Which parameters have weight decay, in models with different names and types."""

import re

import pytest
import torch
from torch import nn

from tiny_models import KINDS, config_of, tokenizer
from trimtab.errors import RecipeError
from trimtab.model.load import load_model
from trimtab.optim.groups import decay_groups


def names_in(model, groups, *, decayed):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(p)] for group in groups for p in group["params"] if bool(group["weight_decay"]) is decayed]


def tiny(kind):
    return load_model(config_of(kind), KINDS[kind], {}, tokenizer())


@pytest.mark.parametrize(
    ("kind", "spared"),
    [
        ("bert", r"LayerNorm|bias"),
        ("gpt2", r"ln_|bias"),
        ("llama", r"norm"),
        ("t5", r"layer_norm"),  # relative_attention_bias is a table of embeddings, whatever its name says
    ],
)
def test_groups_of_known_models(kind, spared):
    model = tiny(kind)
    groups = decay_groups(model, 0.1)
    expected = [name for name, _ in model.named_parameters() if re.search(spared, name)]
    assert len(expected) > 2
    assert names_in(model, groups, decayed=False) == expected
    every = [p for group in groups for p in group["params"]]
    assert sorted(map(id, every)) == sorted(id(p) for p in model.parameters())


class OwnNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 3))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up_proj = nn.Parameter(torch.ones(4, 2, 3))
        self.up_proj_bias = nn.Parameter(torch.ones(4, 3))


class Zoo(nn.Module):
    """Names that mislead: the types decide."""

    def __init__(self):
        super().__init__()
        self.norm = nn.Linear(3, 3)
        self.alpha = nn.LayerNorm([2, 3])
        self.beta = OwnNorm()
        self.batch = nn.BatchNorm2d(3)
        self.instance = nn.InstanceNorm1d(3, affine=True)
        self.group = nn.GroupNorm(1, 4)
        self.attention = nn.MultiheadAttention(4, 2, add_bias_kv=True)
        self.experts = Experts()
        self.temperature = nn.Parameter(torch.ones(()))
        self.bias_table = nn.Embedding(5, 3)


def test_types_decide_and_not_names():
    model = Zoo()
    decayed = names_in(model, decay_groups(model, 0.1), decayed=True)
    assert decayed == [
        "norm.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "experts.up_proj",
        "bias_table.weight",
    ]


def test_embeddings_without_decay():
    model = Zoo()
    assert "bias_table.weight" in names_in(model, decay_groups(model, 0.1, decay_embeddings=False), decayed=False)


def test_tied_weights_count_once_and_follow_the_embedding():
    model = tiny("gpt2")
    assert model.lm_head.weight is model.transformer.wte.weight
    for decay_embeddings in (True, False):
        groups = decay_groups(model, 0.1, decay_embeddings=decay_embeddings)
        places = [g["weight_decay"] for g in groups for p in g["params"] if p is model.lm_head.weight]
        assert places == [0.1 if decay_embeddings else 0.0]


def test_frozen_parameters_only_if_they_will_train():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert names_in(model, decay_groups(model, 0.1), decayed=True) == ["2.weight"]
    both = names_in(model, decay_groups(model, 0.1, include_frozen=True), decayed=True)
    assert both == ["0.weight", "2.weight"]


def test_quantized_weights_are_never_given_to_an_optimizer():
    model = nn.Linear(3, 3)
    model.packed = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    groups = decay_groups(model, 0.1, include_frozen=True)
    assert all(p.is_floating_point() for group in groups for p in group["params"])


def test_groups_do_not_depend_on_the_weight_decay():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    sizes = [[len(group["params"]) for group in decay_groups(model, value)] for value in (0.0, 0.1)]
    assert sizes[0] == sizes[1] == [1, 3]
    assert len(decay_groups(nn.LayerNorm(3), 0.1)) == 1  # no empty group


def test_nothing_to_train():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(RecipeError, match="Linear has no trainable parameters") as caught:
        decay_groups(model, 0.1)
    assert "train.freeze" in caught.value.cure
