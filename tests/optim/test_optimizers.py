"""Optimizers against their formulas in double precision, and the settings that they refuse."""

import pytest
import torch
from torch import nn

from rounding import assert_same_up_to_rounding
from trimtab import Engine
from trimtab.errors import RecipeError
from trimtab.optim.adagrad import Adagrad
from trimtab.optim.build import OPTIMIZERS, build_optimizer
from trimtab.optim.groups import decay_groups
from trimtab.optim.schedules import build_schedule

LR, EPS, DECAY = 0.01, 1e-8, 0.1
LR_OF = {"adafactor": 0.05}


def adam(decoupled):
    def update(p, g, state, t):
        if not decoupled:
            g = g + DECAY * p
        m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
        v = state["v"] = 0.98 * state.get("v", 0) + 0.02 * g * g
        step = LR * (m / (1 - 0.9**t)) / ((v / (1 - 0.98**t)).sqrt() + EPS)
        return p - step - (LR * DECAY * p if decoupled else 0)

    return update


def adagrad(p, g, state, t):
    g = g + DECAY * p
    s = state["s"] = state.get("s", 0) + g * g
    return p - LR * g / (s.sqrt() + EPS)


def sgd(p, g, state, t):
    g = g + DECAY * p
    b = state["b"] = 0.9 * state.get("b", 0) + g
    return p - LR * b


FORMULAS = {
    "adamw": (adam(decoupled=True), {"betas": (0.9, 0.98)}),
    "adam": (adam(decoupled=False), {"betas": (0.9, 0.98)}),
    "adagrad": (adagrad, {}),
    "sgd": (sgd, {"momentum": 0.9}),
}


@pytest.mark.parametrize(
    ("name", "device", "fused"),
    [
        ("adamw", "cpu", True),
        ("adam", "cpu", True),
        ("sgd", "cpu", None),
        ("adagrad", "cpu", True),
        # named after a device without fused steps, stepped on the CPU
        ("adamw", "meta", None),
        ("adam", "meta", None),
        ("sgd", "meta", None),
        ("adagrad", "meta", None),
    ],
)
def test_same_math_as_the_formula(name, device, fused):
    formula, settings = FORMULAS[name]
    parameter = nn.Parameter(torch.randn(6, 5))
    groups = [{"params": [parameter], "weight_decay": DECAY}]
    optimizer = build_optimizer(name, groups, lr=LR, device=device, **settings)
    assert optimizer.param_groups[0].get("fused") is fused
    expected, state = parameter.detach().double(), {}
    for t in range(1, 8):
        gradient = torch.randn(6, 5)
        parameter.grad = gradient
        optimizer.step()
        expected = formula(expected, gradient.double(), state, t)
        assert_same_up_to_rounding(parameter, expected, num_roundings=4 * t)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_trains_and_resumes_to_the_same_bits(name, tmp_path):
    def build():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.Linear(16, 1))
        engine = Engine(cpu=True)
        optimizer = build_optimizer(name, decay_groups(model, 0.01), lr=LR_OF.get(name, 0.02), device="cpu")
        scheduler = build_schedule("cosine", optimizer, num_steps=30, warmup_steps=3)
        return engine, *engine.prepare(model, optimizer, scheduler)

    def train(run, batches):
        engine, model, optimizer, scheduler = run
        losses = []
        for x in batches:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    batches = list(torch.randn(30, 8, 6))
    whole = build()
    losses = train(whole, batches[:12])
    whole[0].save_state(tmp_path / "state")
    losses += train(whole, batches[12:])
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    resumed = build()
    resumed[0].load_state(tmp_path / "state")
    assert resumed[3].last_epoch == 12
    assert train(resumed, batches[12:]) == losses[12:]
    for ours, theirs in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("device", ["cpu", "meta"], ids=["fused", "not fused"])
def test_adagrad_equals_torch_without_state_of_frozen_parameters(device, tmp_path):
    """One parameter is unfrozen later, and the run is resumed before and after that."""

    def build(kind):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 20))
        model[0].requires_grad_(False)
        groups = decay_groups(model, 0.1, include_frozen=True)
        if kind == "ours":
            optimizer = build_optimizer("adagrad", groups, lr=LR, eps=EPS, device=device)
        else:
            optimizer = torch.optim.Adagrad(groups, lr=LR, eps=EPS, fused=True if device == "cpu" else None)
        engine = Engine(cpu=True)
        return engine, *engine.prepare(model, optimizer)

    def train(run, batches):
        engine, model, optimizer = run
        for x in batches:
            engine.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    batches = list(torch.randn(9, 4, 40))
    ours, theirs = build("ours"), build("theirs")
    assert not ours[2].state
    assert len(theirs[2].state) == 4
    assert ours[2].param_groups[0]["fused"] is theirs[2].param_groups[0]["fused"]
    for begin in (0, 3, 6):
        if begin:
            ours[0].save_state(tmp_path / f"state-{begin}")
            resumed = build("ours")
            if begin == 6:
                resumed[1].requires_grad_(True)
            resumed[0].load_state(tmp_path / f"state-{begin}")
            ours = resumed
            assert len(ours[2].state) == (2 if begin == 3 else 4)
        for run in (ours, theirs):
            run[1].requires_grad_(begin > 0)
            run[1][1].requires_grad_(True)
            train(run, batches[begin : begin + 3])
        for a, b in zip(ours[1].parameters(), theirs[1].parameters(), strict=True):
            assert torch.equal(a, b)
    for p, q in zip(ours[1].parameters(), theirs[1].parameters(), strict=True):
        assert torch.equal(ours[2].state[p]["sum"], theirs[2].state[q]["sum"])
        assert ours[2].state[p]["step"] == theirs[2].state[q]["step"]


FORMS = [("adamw", torch.float32), ("adamw", torch.bfloat16), ("adamw8bit", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), FORMS)
def test_a_parameter_that_unfreezes_later_has_no_state_before_and_its_own_step_count(name, dtype):
    if "8bit" in name:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    early, late = (nn.Parameter(torch.zeros(5000, dtype=dtype)) for _ in range(2))
    late.requires_grad_(False)
    options = {"lr": 0.125, "rounds_stochastically": dtype is torch.bfloat16}
    optimizer = build_optimizer(name, [{"params": [early, late]}], **options)
    for _ in range(20):
        early.grad = torch.ones_like(early)
        optimizer.step()
    assert late not in optimizer.state
    late.requires_grad_(True)
    late.grad = torch.full_like(late, 2.0**-10)
    optimizer.step()
    assert optimizer.state[late]["step"] == 1
    # the first step of Adam is lr × sign; its eps of 1e-8 takes a hundred-thousandth from a gradient of 1e-3
    tolerance = 2e-5 if dtype is torch.float32 else 0.01
    assert torch.allclose(late.float(), torch.tensor(-0.125), rtol=tolerance)


@pytest.mark.parametrize(("name", "dtype"), [("sgd", torch.bfloat16), ("adagrad8bit", torch.float32)])
def test_a_closure(name, dtype):
    """Of the optimizers with a step of their own."""
    if "8bit" in name:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    p = nn.Parameter(torch.ones(5000, dtype=dtype))
    optimizer = build_optimizer(name, [{"params": [p]}], lr=0.25, rounds_stochastically=dtype is torch.bfloat16)

    def loss():
        optimizer.zero_grad()
        value = p.float().square().sum()
        value.backward()
        return value

    first = optimizer.step(loss)
    assert first == 5000
    assert optimizer.step(loss) < first


def test_adagrad_takes_parameters_without_groups():
    p = nn.Parameter(torch.zeros(3))
    optimizer = Adagrad([p], lr=0.5, eps=EPS)
    p.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(p, torch.tensor(-0.5))
    assert optimizer.param_groups[0]["eps"] == EPS


def test_decay_acts_on_its_group_alone():
    model = nn.Linear(3, 3)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    optimizer = build_optimizer("adamw", decay_groups(model, 0.5), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.allclose(model.weight, torch.tensor(0.95))
    assert torch.equal(model.bias, torch.ones(3))


@pytest.mark.parametrize(
    ("name", "settings", "problem", "cure"),
    [
        ("adamw", {"momentum": 0.9}, "train.momentum=0.9 has no effect on adamw", "train.optimizer: sgd"),
        ("sgd", {"betas": (0.9, 0.98)}, "train.betas=(0.9, 0.98) has no effect on sgd", "adamw or adam"),
        ("adafactor", {"eps": 1e-6}, "train.eps=1e-06 has no effect on adafactor", "leave train.eps out"),
        ("paged-adagrad8bit", {"betas": (0.9, 0.98)}, "has no effect on paged-adagrad8bit", "leave train.betas out"),
        ("adamw", {"lr": float("nan")}, "train.lr=nan", "of at least 0"),
        ("adamw", {"lr": -1.0}, "train.lr=-1.0", "of at least 0"),
        ("adamw", {"betas": (0.9, 1.0)}, "train.betas=(0.9, 1.0)", "less than 1"),
        ("adam", {"eps": -1.0}, "train.eps=-1.0", "of at least 0"),
        ("adamW_fused", {}, "did you mean adamw?", "one of adamw, adam, adagrad, sgd, adafactor"),
    ],
)
def test_what_is_refused(name, settings, problem, cure):
    groups = [{"params": [nn.Parameter(torch.zeros(2))]}]
    with pytest.raises(RecipeError) as caught:
        build_optimizer(name, groups, **{"lr": 0.1, **settings})
    assert problem in caught.value.problem
    assert cure in caught.value.cure


def test_betas_may_come_as_a_list():
    """As they do from YAML."""
    optimizer = build_optimizer("sgd", [{"params": [nn.Parameter(torch.zeros(2))]}], lr=0.1, betas=[0.9, 0.999])
    assert isinstance(optimizer, torch.optim.SGD)


@pytest.mark.parametrize(("lr", "is_reported"), [(5e-5, True), (1e-2, False)])
def test_a_small_learning_rate_of_adafactor_is_reported(lr, is_reported, caplog):
    with caplog.at_level("INFO", logger="trimtab"):
        build_optimizer("adafactor", [{"params": [nn.Parameter(torch.zeros(2))]}], lr=lr)
    assert ("relative to the size" in caplog.text) is is_reported
