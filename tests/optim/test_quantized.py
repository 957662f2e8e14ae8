"""8-bit optimizers against fp32 and bitsandbytes' own: numbers, state, paging, copies, errors."""

import copy
import importlib.util

import pytest
import torch
from torch import nn

from rounding import assert_same_up_to_rounding
from trimtab import Engine
from trimtab.errors import MissingDependency
from trimtab.optim import quantized, stochastic_rounding
from trimtab.optim.build import PAGED, QUANTIZED, build_optimizer
from trimtab.optim.groups import decay_groups

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")

NAMES = [*QUANTIZED, *(PAGED + name for name in QUANTIZED)]
LR = 0.01


def parameter(*shape, seed=0, dtype=torch.float32):
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return nn.Parameter(values.to(dtype))


def train(optimizer, parameters, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def build(name, parameters, weight_decay=0.0, **settings):
    return build_optimizer(
        name, [{"params": parameters, "weight_decay": weight_decay}], **{"lr": LR, "device": "cpu", **settings}
    )


# ---------------------------------------------------------------------- numbers


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad"])
def test_close_to_fp32_and_equal_in_the_first_step(name, weight_decay):
    """The first step uses moments before they are made 8 bits: the same but for rounding, with the same weight decay.

    After 20 steps of random gradients weights are off by under 2% of how far they came in the mean, and none by more
    than one step.
    """
    exact, small, start = parameter(100, 50), parameter(100, 50), parameter(100, 50)
    for num_steps in (1, 19):
        train(optimizer := build(name, [exact], weight_decay), [exact], num_steps)
        train(build(f"{name}8bit", [small], weight_decay), [small], num_steps)
        if num_steps == 1:
            assert_same_up_to_rounding(small, exact, num_roundings=4)
    assert (exact - small).abs().max() < LR
    assert (exact - small).abs().mean() < 0.02 * (exact - start).abs().mean()
    assert optimizer.state[exact]["step"] == 19


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("adamw8bit", lambda p, decay: bnb.optim.AdamW8bit(p, LR, (0.8, 0.99), 1e-6, decay)),
        ("adagrad8bit", lambda p, decay: bnb.optim.Adagrad8bit(p, LR, weight_decay=decay, eps=1e-6)),
    ],
)
def test_equals_bitsandbytes_bit_for_bit(name, theirs, weight_decay):
    """With betas and eps other than its defaults; a large and a small parameter."""
    ours, others = ([parameter(90, 60), parameter(30)] for _ in range(2))
    settings = {"betas": (0.8, 0.99)} if "adam" in name else {}
    train(build(name, ours, weight_decay, eps=1e-6, **settings), ours, 5)
    train(theirs(others, weight_decay), others, 5)
    for a, b in zip(ours, others, strict=True):
        assert torch.equal(a, b)


def test_small_parameters_step_as_in_fp32():
    exact, small = parameter(63, 65), parameter(63, 65)
    train(build("adamw", [exact], 0.1), [exact], 20)
    train(optimizer := build("adamw8bit", [small], 0.1), [small], 20)
    assert optimizer.state[small]["state1"].dtype is torch.float32
    assert_same_up_to_rounding(small, exact, num_roundings=4 * 20)


def test_slices_change_nothing(monkeypatch):
    """Adam's decay needs room, and takes it slice by slice."""
    whole, sliced = parameter(101, 77), parameter(101, 77)
    train(build("adam8bit", [whole], 0.1), [whole], 4)
    monkeypatch.setattr(quantized, "SLICE", 1024)
    train(optimizer := build("adam8bit", [sliced], 0.1), [sliced], 4)
    assert torch.equal(whole, sliced)
    assert len(optimizer.state[sliced]["absmax1"]) == 31


@pytest.mark.parametrize("name", QUANTIZED)
def test_non_contiguous_weights(name):
    plain = parameter(80, 70)
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    assert not turned.is_contiguous()
    address = turned.data_ptr()
    train(build(name, [plain], 0.1), [plain], 3)
    train(build(name, [turned], 0.1), [turned], 3)
    assert torch.equal(plain, turned)
    assert turned.data_ptr() == address
    assert not turned.is_contiguous()


def test_gradients_are_not_changed():
    p = parameter(70, 70)
    gradient = torch.randn(70, 70)
    p.grad = gradient.clone()
    build("adam8bit", [p], 0.1).step()
    assert torch.equal(p.grad, gradient)


@pytest.mark.parametrize("name", QUANTIZED)
def test_bf16_weights_with_stochastic_rounding(name, monkeypatch):
    """Updates of a tenth of the spacing: lost with rounding to nearest, they add up with stochastic rounding."""
    monkeypatch.setattr(quantized, "SLICE", 1024)  # several slices
    spacing, num_steps = 2.0**-7, 40

    def moved(rounds_stochastically):
        p = nn.Parameter(torch.full((5000,), 1.5, dtype=torch.bfloat16))
        optimizer = build(name, [p], lr=spacing / 10, rounds_stochastically=rounds_stochastically)
        for _ in range(num_steps):
            p.grad = torch.ones_like(p)
            optimizer.step()
        assert p.dtype is torch.bfloat16
        return (1.5 - p.double().mean()).item() / spacing

    # of Adagrad the n-th step is 1 / sqrt(n) of the first
    expected = sum(0.1 / (n**0.5 if "adagrad" in name else 1) for n in range(1, num_steps + 1))
    assert moved(rounds_stochastically=False) == 0
    # one element strays by half a spacing a step at most: 40 steps, 5000 elements, and 2% for what 8 bits lose
    assert moved(rounds_stochastically=True) == pytest.approx(expected, rel=0.02, abs=0.5 * (40 / 5000) ** 0.5)


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("name", NAMES)
def test_resumes_to_the_same_bits(name, tmp_path):
    """One parameter has no gradient before the checkpoint, and no state in it."""

    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 64))
        model[2].requires_grad_(False)
        for p in model[2].parameters():
            p.data.fill_(0.1)  # the frozen base is the same in both
        engine = Engine(cpu=True)
        optimizer = build_optimizer(name, decay_groups(model, 0.01, include_frozen=True), lr=LR)
        return engine, *engine.prepare(model, optimizer)

    def steps(run, batches):
        engine, model, optimizer = run
        for x in batches:
            engine.backward((model(x) - x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    batches = list(torch.randn(9, 8, 64))
    whole, resumed = prepared(1), prepared(2)
    steps(whole, batches[:4])
    whole[0].save_state(tmp_path / "state")
    resumed[0].load_state(tmp_path / "state")
    states = resumed[2].state
    assert [sorted(states[p]) if p in states else None for p in resumed[1].parameters()].count(None) == 2
    assert states[resumed[1][0].weight]["state1"].dtype is torch.uint8
    assert states[resumed[1][0].weight]["step"] == 4
    for run in (whole, resumed):
        run[1][2].requires_grad_(True)
        steps(run, batches[4:])
    for ours, theirs in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("theirs", ["AdamW8bit", "Adagrad8bit"])
def test_optimizers_of_bitsandbytes_itself_resume(theirs, tmp_path):
    """8 bits stay 8 bits, and all parameters share one table again."""

    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64))
        engine = Engine(cpu=True)
        return engine, *engine.prepare(model, getattr(bnb.optim, theirs)(model.parameters(), lr=LR))

    whole, resumed = prepared(1), prepared(2)
    train(whole[2], list(whole[1].parameters()), 3, seed=3)
    whole[2].zero_grad()
    whole[0].save_state(tmp_path / "state")
    resumed[0].load_state(tmp_path / "state")
    large = [state for state in resumed[2].state.values() if "qmap1" in state]
    assert len(large) == 2
    assert len({state["qmap1"].data_ptr() for state in large}) == 1
    assert {state["state1"].dtype for state in large} == {torch.uint8}
    for run in (whole, resumed):
        train(run[2], list(run[1].parameters()), 3, seed=4)
    for a, b in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", QUANTIZED)
def test_state_dict_and_copies_continue_with_the_same_bits(name):
    p = parameter(5000)
    optimizer = build(name, [p], 0.1)
    train(optimizer, [p], 3)
    loaded = nn.Parameter(p.detach().clone())
    other = build(name, [loaded], 0.5)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, twin = copy.deepcopy((p, optimizer))
    for a, b in [(p, optimizer), (loaded, other), (copied, twin)]:
        train(b, [a], 3, seed=5)
        assert b.state[a]["state1"].dtype is torch.uint8
        assert torch.equal(a, p)
    assert twin.state[copied]["state1"].data_ptr() != optimizer.state[p]["state1"].data_ptr()


def test_loading_removes_state_that_was_not_saved():
    p = parameter(5000)
    optimizer = build("adamw8bit", [p])
    empty = optimizer.state_dict()
    train(optimizer, [p], 1)
    optimizer.load_state_dict(empty)
    assert not optimizer.state


def test_with_loss_scaling():
    """fp16: an overflow is skipped and leaves no state; a finite gradient steps."""
    torch.manual_seed(0)
    model = nn.Linear(80, 80)
    engine = Engine(cpu=True, mixed_precision="fp16")
    model, optimizer = engine.prepare(model, build("adamw8bit", list(model.parameters())))
    for factor, is_skipped in [(float("inf"), True), (1.0, False)]:
        before = model.weight.detach().clone()
        engine.backward(model(torch.ones(2, 80)).float().mean() * factor)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.step_was_skipped is is_skipped
        assert torch.equal(model.weight, before) is is_skipped
    assert optimizer.state[model.weight]["step"] == 1


# ---------------------------------------------------------------------- messages and errors


def test_paging_without_a_gpu_is_reported(monkeypatch):
    lines = []
    monkeypatch.setattr("trimtab.optim.build.log_info_once", lines.append)
    p = parameter(400, 400)
    optimizer = build("paged-adagrad8bit", [p])
    train(optimizer, [p], 1)
    assert lines == ["paged-adagrad8bit: paging needs an NVIDIA GPU; the state is not paged"]
    assert not quantized.is_paged(optimizer.state[p]["state1"])


def test_without_bitsandbytes(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "bitsandbytes" else real(name, *a)
    )
    with pytest.raises(MissingDependency) as caught:
        build("paged-adam8bit", [parameter(3)])
    assert "train.optimizer: paged-adam8bit needs bitsandbytes" in caught.value.problem
    assert "pip install 'trimtab[bitsandbytes]'" in caught.value.cure


def test_slices_hold_whole_blocks():
    assert quantized.SLICE is stochastic_rounding.SLICE
    assert quantized.SLICE % quantized.BLOCK == quantized._MAX_ELEMENTS % quantized.BLOCK == 0
