"""What is frozen costs nothing but its weights: no gradient, no optimizer state, nothing kept or done for backward."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kept_bytes import kept_bytes
from tiny_models import TEXTS, batch_of, config_of, tokenizer
from trimtab.model.freeze import Freezing
from trimtab.model.load import load_model
from trimtab.optim.build import OPTIMIZERS, build_optimizer
from trimtab.optim.groups import decay_groups
from trimtab.units import parse_every

_LABELS = torch.tensor([0, 1, 0, 1, 1])


def classifier(num_blocks=2, dropout=0.0):
    config = config_of("bert") | {"num_hidden_layers": num_blocks}
    config |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    torch.manual_seed(0)
    return load_model(config, "sequence-classification", {"num_labels": 2}, tokenizer()).train()


def loss_of(model):
    return model(**batch_of(TEXTS), labels=_LABELS).loss


def freeze_below(model, first_trained):
    names = ["bert.embeddings"] + [f"bert.encoder.layer.{number}" for number in range(first_trained)]
    Freezing(model, dict.fromkeys(names)).apply()
    return model


class Products(TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
        return func(*args, **(kwargs or {}))


def products_in_backward(model):
    loss = loss_of(model)
    with Products() as products:
        loss.backward()
    return products.count


def nbytes_of_state(optimizer, parameters):
    return sum(
        value.untyped_storage().nbytes()
        for parameter in parameters
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, torch.Tensor)
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_gradients_and_no_state_until_it_trains(name):
    """The optimizer is given all parameters, because some of them will train later."""
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")
    model = classifier()
    freezing = Freezing(model, {"bert.encoder.layer.0": parse_every("2 steps"), "bert.embeddings": None})
    freezing.apply()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in frozen]
    optimizer = build_optimizer(
        name, decay_groups(model, 0.1, include_frozen=True), lr=0.01, **({"momentum": 0.9} if name == "sgd" else {})
    )
    assert nbytes_of_state(optimizer, frozen) == 0
    for _ in range(2):
        loss_of(model).backward()
        optimizer.step()
        assert all(p.grad is None for p in frozen)
        assert nbytes_of_state(optimizer, frozen) == 0
        optimizer.zero_grad()
    assert nbytes_of_state(optimizer, trained) > sum(p.numel() for p in trained) / 4
    assert all(map(torch.equal, frozen, before))
    assert freezing.at_step(2, 0.0) == ["bert.encoder.layer.0"]
    loss_of(model).backward()
    optimizer.step()
    begun = list(model.bert.encoder.layer[0].parameters())
    still = list(model.bert.embeddings.parameters())
    assert all(nbytes_of_state(optimizer, [p]) > 0 for p in begun)
    assert nbytes_of_state(optimizer, still) == 0
    moved = {id(p) for p, start in zip(frozen, before, strict=True) if not torch.equal(p, start)}
    assert moved == {id(p) for p in begun}


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_is_kept_below_the_first_that_trains(dropout):
    """Each frozen block saves what the others save, and a model that is frozen up to a block is as a shorter one."""
    kept = [
        kept_bytes(model, partial(loss_of, model))
        for model in (freeze_below(classifier(4, dropout), number) for number in range(5))
    ]
    steps = [more - less for more, less in zip(kept[:-1], kept[1:], strict=True)]
    assert len(set(steps)) == 1
    assert steps[0] > 0
    for num_blocks in (1, 2):
        shorter = freeze_below(classifier(num_blocks, dropout), 0)
        assert kept[4 - num_blocks] == kept_bytes(shorter, partial(loss_of, shorter))


def test_backward_stops_above_what_is_frozen():
    counts = [products_in_backward(freeze_below(classifier(4), number)) for number in range(5)]
    steps = [more - less for more, less in zip(counts[:-1], counts[1:], strict=True)]
    # Six linear layers with two products each. The lowest block that trains needs no gradient of its input, which
    # saves one for each of q, k and v; where no block trains, the pooler is the lowest and saves one.
    assert steps == [12, 12, 12, 12 - 3 + 1]
    assert products_in_backward(freeze_below(classifier(2), 2)) == counts[4]


def test_a_frozen_weight_above_one_that_trains_costs_one_product():
    """The gradient goes through it, and none is made for it."""
    whole, part = classifier(), classifier()
    part.bert.encoder.layer[1].intermediate.dense.requires_grad_(False)
    assert products_in_backward(whole) - products_in_backward(part) == 1
    assert part.bert.encoder.layer[1].intermediate.dense.weight.grad is None
