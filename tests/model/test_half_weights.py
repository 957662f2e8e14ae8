"""Copies of weights in half precision: the numbers of autocast, and a model that is as it was afterwards."""

import copy
import weakref

import pytest
import torch

from trimtab.model.half_weights import HalfWeights


class Model(torch.nn.Module):
    """Linear layers, one of them with the weight of an embedding, and a norm, which autocast computes in fp32."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(7, 6)
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.LayerNorm(6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.norm(self.first(self.embedding(ids)) + self.first(self.embedding(ids + 1)))
            return self.head(self.frozen(hidden))


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


IDS = torch.tensor([1, 5, 2, 0])


@pytest.mark.parametrize("keeps", [False, True])
def test_outputs_and_gradients_are_those_of_autocast(keeps):
    torch.manual_seed(0)
    model = Model()
    plain = copy.deepcopy(model)
    half = HalfWeights(model, torch.bfloat16)
    for _ in range(2):  # the second time gradients are added
        wanted = plain(IDS)
        wanted.float().square().mean().backward()
        with half.in_use(keeps_gradients=keeps):
            assert model.first.weight.dtype is torch.bfloat16
            found = model(IDS)
            found.float().square().mean().backward()
        for parameter, gradient in half.take_gradients():
            assert keeps
            assert gradient.dtype is torch.bfloat16
            parameter.grad = gradient.float() if parameter.grad is None else parameter.grad + gradient
        assert torch.equal(found, wanted)
        for name, gradient in gradients(plain).items():
            if name.startswith("frozen"):
                assert gradients(model)[name] is gradient is None
            else:
                assert torch.equal(gradients(model)[name], gradient), name


def test_only_trainable_weights_of_linear_layers_are_copied_and_all_come_back():
    model = Model()
    before = dict(model.named_parameters())
    half = HalfWeights(model, torch.float16)
    assert [id(p) for p in half.parameters] == [id(model.first.weight), id(model.first.bias)], "the head is shared"
    with half.in_use():
        assert model.first.weight is half.copies[0]
        assert torch.equal(model.first.weight, before["first.weight"].half())
    with pytest.raises(IndexError), half.in_use():
        model(torch.tensor([99]))
    assert all(model.get_parameter(name) is parameter for name, parameter in before.items())
    assert not HalfWeights(model, None).copies


def test_new_values_of_weights_are_copied_again():
    model = Model()
    half = HalfWeights(model, torch.bfloat16)
    with torch.no_grad():
        model.first.weight.fill_(3.0)
    with half.in_use():
        assert (model.first.weight == 3).all()


def test_adapters_are_left_alone():
    model = Model()
    model.first.lora_A = torch.nn.ModuleDict()
    assert not HalfWeights(model, torch.bfloat16).copies


def test_copies_are_freed_with_the_object():
    """Hooks of the copies do not keep it alive, which Python's garbage collector would not see."""
    half = HalfWeights(torch.nn.Linear(4, 4), torch.bfloat16)
    known = weakref.ref(half), *(weakref.ref(copy) for copy in half.copies)
    del half
    assert [reference() for reference in known] == [None] * 3
