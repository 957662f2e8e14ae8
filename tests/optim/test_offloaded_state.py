"""Optimizer state in host memory: the bits of a plain step, checkpoints, and what is fetched ahead."""

import copy

import pytest
import torch
from torch import nn

from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.state import OptimizerPart
from trimtab.optim import offloaded_state
from trimtab.optim.build import build_optimizer
from trimtab.optim.in_backward import update_in_backward, updates_of
from trimtab.optim.offloaded_state import has_state_on_host, offload_state
from trimtab.optim.preallocation import preallocate_state
from trimtab.optim.streamed_update import build_streamed

CPU = torch.device("cpu")
NAMES = ["adamw", "adam", "adagrad", "sgd", "adamw8bit", "adam8bit", "adagrad8bit"]


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(offloaded_state, "SLOT_BYTES", 2**16)
    monkeypatch.setattr(offloaded_state, "NUM_SLOTS", 3)
    monkeypatch.setattr(offloaded_state, "MIN_ELEMENTS", 256)


def layers(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 300), nn.Tanh(), nn.Linear(300, 20))
    model[2].weight.data = model[2].weight.data.t().contiguous().t()  # not contiguous
    return model


def build(name, model, *, offloads, streams=False):
    if "8bit" in name:
        pytest.importorskip("bitsandbytes")

    def plain(groups, device):
        return build_optimizer(name, groups, lr=0.01, momentum=0.9 if name == "sgd" else 0.0, device=device)

    groups = [{"params": list(model.parameters()), "weight_decay": 0.1}]
    if streams:
        return build_streamed(plain, groups, CPU, model)
    return offload_state(plain, groups, CPU) if offloads else plain(groups, CPU)


def train(model, optimizer, steps, *, in_backward=False):
    for seed in steps:
        rows = torch.randn(8, 200, generator=torch.Generator().manual_seed(seed))
        if in_backward:
            updates_of(model).begin_window(1)
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def same(model, other):
    return all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_bits_are_those_of_a_plain_step(name, in_backward):
    plain, model = layers(), layers()
    usual, optimizer = (build(name, one, offloads=one is model) for one in (plain, model))
    if in_backward:
        update_in_backward(model, optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    train(plain, usual, range(4))
    train(model, optimizer, range(4), in_backward=in_backward)
    assert same(model, plain)
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))
    large = [parameter for parameter in model.parameters() if has_state_on_host(parameter)]
    assert len(large) == 4, "8-bit optimizers have fp32 state of one of them"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[ours].keys() == usual.state[theirs].keys()
        for key, value in optimizer.state[ours].items():
            expected = usual.state[theirs][key]
            assert torch.equal(value, expected) if isinstance(value, torch.Tensor) else value == expected


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_slices_are_fetched_ahead(name):
    """After the first pass, in the order of the pass before, also from one step to the next."""
    model = layers()
    optimizer = build(name, model, offloads=True)
    train(model, optimizer, range(2))
    offloaded = vars(optimizer)["state_on_host"]
    assert len(offloaded._order) > 4  # several slices
    fetch, take, missed = offloaded._fetch, offloaded._take, []
    offloaded._take = lambda key: (missed.append(key) if key not in offloaded._fetched else None, take(key))[1]
    train(model, optimizer, range(2, 4))
    assert missed == []
    assert fetch is not None


@pytest.mark.parametrize("name", ["adamw", "adagrad", "adamw8bit"])
def test_checkpoints_go_from_one_way_to_the_other(name):
    models = [layers() for _ in range(2)]
    first = [build(name, model, offloads=model is models[0]) for model in models]
    for model, optimizer in zip(models, first, strict=True):
        train(model, optimizer, range(3))
    saved = [
        encode(OptimizerPart("optimizer", *pair).capture()) for pair in zip(first, ([m] for m in models), strict=True)
    ]
    saved = copy.deepcopy(saved)
    for offloads, tree in zip((True, False), reversed(saved), strict=True):
        model = layers()
        model.load_state_dict(models[0].state_dict())
        optimizer = build(name, model, offloads=offloads)
        part = OptimizerPart("optimizer", optimizer, [model])
        if offloads:  # as a run does; what was fetched ahead is forgotten
            preallocate_state(optimizer, model.parameters())
        part.apply(tree.tree, tree.tensors.__getitem__)
        train(model, optimizer, range(3, 5))
        other = copy.deepcopy(models[1])
        again = build(name, other, offloads=False)
        OptimizerPart("optimizer", again, [other]).apply(tree.tree, tree.tensors.__getitem__)
        train(other, again, range(3, 5))
        assert same(model, other)


def test_state_that_a_checkpoint_lacks_is_allocated_again():
    model, plain = layers(), layers()
    optimizer, usual = build("adamw", model, offloads=True), build("adamw", plain, offloads=False)
    empty = encode(OptimizerPart("optimizer", usual, [plain]).capture())
    train(model, optimizer, range(2))
    model.load_state_dict(plain.state_dict())
    OptimizerPart("optimizer", optimizer, [model]).apply(empty.tree, empty.tensors.__getitem__)
    for one, its in ((model, optimizer), (plain, usual)):
        train(one, its, range(5, 8))
    assert same(model, plain)


def test_parameters_that_train_later_and_other_orders():
    model, plain = layers(), layers()
    optimizer, usual = build("adamw", model, offloads=True), build("adamw", plain, offloads=False)
    for one, its in ((model, optimizer), (plain, usual)):
        one[2].requires_grad_(False)
        train(one, its, range(2))
        one[2].requires_grad_(True)
        train(one, its, range(2, 4))
        one[4].requires_grad_(False)
        train(one, its, range(4, 7))
    assert same(model, plain)


def test_stochastic_rounding_repeats_itself():
    def trained():
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(20000).bfloat16())

        def plain(groups, device):
            return build_optimizer("adamw", groups, lr=0.01, device=device, rounds_stochastically=True)

        optimizer = offload_state(plain, [{"params": [parameter]}], CPU)
        for seed in range(2):
            parameter.grad = torch.ones(20000).bfloat16() * (seed + 1)
            optimizer.step()
        return parameter.detach(), optimizer

    (first, optimizer), (second, _) = trained(), trained()
    assert torch.equal(first, second)
    assert optimizer.param_groups[0]["num_roundings"] == 2


# ---------------------------------------------------------------------- odd parameters, passes and states


class Odd(nn.Module):
    """Experts of which a step uses some, a scalar, and a parameter without elements."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.others = nn.ParameterDict({"scale": torch.tensor(2.0), "nothing": torch.zeros(0, 64)})

    def forward(self, rows, used):
        for number in used:
            rows = self.experts[number](rows)
        return (rows * self.others["scale"]).square().mean() + self.others["nothing"].sum()


USED = [(0, 1, 2, 3), (1, 2, 3), (0, 1, 2, 3), (0, 1, 2, 3), (2,), (3, 0), (0, 1, 2, 3), (0, 1), (0, 1, 2, 3)]


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw8bit"])
def test_parameters_without_gradients_in_some_steps(name, streams):
    """Nothing is taken that was fetched for another step."""
    plain, model = Odd(), Odd()
    usual = build(name, plain, offloads=False)
    optimizer = build(name, model, offloads=True, streams=streams)
    for seed, used in enumerate(USED):
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed))
        for one, its in ((plain, usual), (model, optimizer)):
            one(rows, used).backward()
            its.step()
            its.zero_grad()
        assert same(model, plain), f"step {seed}"


@pytest.mark.parametrize("name", ["adamw", "sgd", "adamw8bit"])
def test_state_that_torch_loads_is_used(name):
    models = [layers() for _ in range(3)]
    first, second, usual = (build(name, model, offloads=number < 2) for number, model in enumerate(models))
    for model, optimizer in zip((models[0], models[2]), (first, usual), strict=True):
        train(model, optimizer, range(3))
    train(models[1], second, range(7, 9))
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for model, optimizer in zip(models[1:], (second, usual), strict=True):
        train(model, optimizer, range(3, 6))
    assert same(models[1], models[2])


def test_groups_are_rounded_with_random_numbers_of_their_own():
    torch.manual_seed(0)
    start = torch.randn(5000).bfloat16()
    parameters = [nn.Parameter(start.clone()) for _ in range(2)]

    def plain(groups, device):
        return build_optimizer("adamw", groups, lr=1e-3, device=device, rounds_stochastically=True)

    optimizer = offload_state(plain, [{"params": [parameter]} for parameter in parameters], CPU)
    for parameter in parameters:
        parameter.grad = torch.ones(5000).bfloat16()
    optimizer.step()
    assert not torch.equal(*parameters)


def test_a_step_that_fails_loses_no_buffers():
    model, plain = layers(), layers()
    optimizer, usual = build("adamw", model, offloads=True), build("adamw", plain, offloads=False)
    train(model, optimizer, range(2))
    offloaded = vars(optimizer)["state_on_host"]
    for _ in range(5):
        optimizer.param_groups[0]["betas"] = "nonsense"
        with pytest.raises((TypeError, ValueError)):
            train(model, optimizer, range(1))
        optimizer.param_groups[0]["betas"] = (0.9, 0.999)
        offloaded.settle()
        assert len(offloaded._free) == offloaded_state.NUM_SLOTS
    empty = encode(OptimizerPart("optimizer", usual, [plain]).capture())
    model.load_state_dict(plain.state_dict())
    OptimizerPart("optimizer", optimizer, [model]).apply(empty.tree, empty.tensors.__getitem__)
    for one, its in ((model, optimizer), (plain, usual)):
        train(one, its, range(5, 8))
    assert same(model, plain)
