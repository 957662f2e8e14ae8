"""Stochastic rounding is unbiased, and bf16 weights follow updates smaller than their spacing."""

import copy
import math

import pytest
import torch
from torch import nn

from trimtab import Engine
from trimtab.errors import RecipeError
from trimtab.optim import stochastic_rounding
from trimtab.optim.build import build_optimizer
from trimtab.optim.stochastic_rounding import RoundingNoise

NAMES = {
    "adamw": {"betas": (0.9, 0.98)},
    "adam": {"eps": 1e-6},
    "adagrad": {},
    "sgd": {},
    "sgd with momentum": {"momentum": 0.9},
}
SPACING = 2.0**-7  # of bf16 from 1 to 2


def build(name, parameters, weight_decay=0.0, rounds=True, **settings):
    groups = [{"params": parameters, "weight_decay": weight_decay}]
    return build_optimizer(
        name.split()[0], groups, **{"lr": 0.01, **NAMES[name], **settings}, rounds_stochastically=rounds
    )


def rounded(values, seed=0, num_roundings=0, index=0):
    target = torch.empty(values.shape, dtype=torch.bfloat16)
    chance = RoundingNoise({"rounding_seed": seed, "num_roundings": num_roundings}, index)
    chance.round_into(target, values.clone(), torch.empty_like(values))
    return target


# ---------------------------------------------------------------------- rounding


@pytest.mark.parametrize("value", [1.0 + SPACING / 3, -1.0 - SPACING / 3, 3.1e-5, 1e30, -7e-40, 1.0 + SPACING * 2**-9])
def test_rounding_is_unbiased(value):
    """Only the two neighbours appear, and the mean of a million draws is within 5 standard errors of the number."""
    num_draws = 1_000_000
    values = torch.full((num_draws,), value)
    exact = values[0].double()
    draws = rounded(values).double()
    low, high = draws.min(), draws.max()
    gap = (high - low).item()
    assert low < exact < high
    assert set(draws.unique().tolist()) == {low.item(), high.item()}
    assert torch.tensor([low, high]).bfloat16().view(torch.int16).diff().abs().item() == 1
    share = ((exact - low) / gap).item()
    error = gap * math.sqrt(share * (1 - share) / num_draws)
    assert abs(draws.mean() - exact) < 5 * error


def test_bf16_numbers_are_not_changed():
    values = torch.cat([torch.randn(1000).bfloat16().float(), torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    for seed in range(20):
        assert torch.equal(rounded(values, seed).view(torch.int16), values.bfloat16().view(torch.int16))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, 0x7FC00001, -0x400000])
def test_nan_stays_nan(bits):
    """The NaN that a GPU makes has all bits set: with anything added it would be a zero."""
    values = torch.full((1000,), bits, dtype=torch.int32).view(torch.float32)
    assert values.isnan().all()
    assert rounded(values).isnan().all()


def test_rounding_depends_only_on_seed_step_and_group():
    """Processes that share a model stand at other random numbers, and have to round alike."""
    values = torch.randn(1000)
    first = rounded(values, 1)
    torch.manual_seed(123)
    assert torch.equal(rounded(values, 1), first)
    for others in [(2, 0, 0), (1, 1, 0), (1, 0, 1)]:
        assert not torch.equal(rounded(values, *others), first)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_processes_that_share_a_model_round_identically(name):
    if "8bit" in name:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    results = []
    for process, seed in [(0, 5), (1, 5), (2, 6)]:
        torch.manual_seed(process)
        p = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
        optimizer = build_optimizer(name, [{"params": [p]}], lr=0.01, rounds_stochastically=True, rounding_seed=seed)
        state = torch.get_rng_state()
        for _ in range(3):
            p.grad = torch.full_like(p, 0.3)
            optimizer.step()
        assert torch.equal(torch.get_rng_state(), state)
        results.append(p)
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


# ---------------------------------------------------------------------- optimizers


def test_weights_move_under_updates_smaller_than_their_spacing():
    """A tenth of the spacing per step: lost with rounding to nearest; the mean is exact with stochastic rounding."""

    def moved(rounds):
        p = nn.Parameter(torch.full((2000,), 1.5, dtype=torch.bfloat16))
        optimizer = build("sgd", [p], lr=SPACING / 10, rounds=rounds)
        for _ in range(50):
            p.grad = torch.ones_like(p)
            optimizer.step()
        return (1.5 - p.detach().double()) / SPACING

    assert moved(rounds=False).abs().max() == 0
    stochastic = moved(rounds=True)
    # a step is a draw of 0 or 1 with mean 0.1: 5 standard errors of 50 steps over 2000 weights
    assert abs(stochastic.mean() - 5.0) < 5 * math.sqrt(50 * 0.09 / 4000)
    assert stochastic.std() == pytest.approx(math.sqrt(50 * 0.09), rel=0.1)


def test_second_moments_move():
    """With beta 0.999 and no gradient a second moment falls to 0.37 in 1000 steps; rounded to nearest it stays at 1."""

    def after(rounds):
        p = nn.Parameter(torch.zeros(500, dtype=torch.bfloat16))
        optimizer = build("adamw", [p], rounds=rounds, betas=(0.9, 0.999))
        p.grad = torch.zeros_like(p)
        optimizer.step()
        optimizer.state[p]["exp_avg_sq"].fill_(1.0)
        for _ in range(1000):
            optimizer.step()
        return optimizer.state[p]["exp_avg_sq"].double().mean().item()

    assert after(rounds=False) == 1.0
    # a relative step of 1/1000 at a spacing of at most 1/128: the spread of 1000 draws over 500 numbers is below 1%
    assert after(rounds=True) == pytest.approx(0.999**1000, rel=0.03)


@pytest.mark.parametrize("name", NAMES)
def test_the_mean_of_many_steps_is_the_exact_step(name):
    """Weights and state, from a state that bf16 holds exactly; and no number strays further than its neighbours."""
    num_copies, decay = 4000, 0.1
    p = nn.Parameter(torch.tensor([1.3, -0.7, 0.02]).bfloat16().repeat(num_copies, 1))
    exact = nn.Parameter(p.detach()[0].double())
    optimizer = build(name, [p], decay)
    truth = build(name, [exact], decay, rounds=False)
    first = torch.tensor([0.5, -0.25, 1.0])
    for gradient in (first, first * 0.75):
        p.grad, exact.grad = gradient.bfloat16().repeat(num_copies, 1), gradient.double()
        optimizer.step()
        truth.step()
        results = {"weights": (p, exact)}
        for key, value in optimizer.state[p].items():
            if key != "step":
                assert value.dtype is torch.bfloat16
                results[key] = (value, truth.state[exact][key])
        for key, (found, wanted) in results.items():
            spread = (found.double() - wanted).abs()
            spacing = 2.0 ** (wanted.abs().log2().floor() - 7)
            assert (spread <= spacing * 1.001).all(), key
            assert ((found.double().mean(0) - wanted).abs() < 5 * 0.5 * spacing / num_copies**0.5 + 1e-7).all(), key
        # continue from bf16 values
        for found, wanted in results.values():
            found.data.copy_(wanted.data.bfloat16().expand_as(found))
            wanted.data.copy_(wanted.data.bfloat16().double())


@pytest.mark.parametrize("device", ["cpu", "meta"], ids=["fused", "not fused"])
@pytest.mark.parametrize("name", NAMES)
def test_fp32_parameters_are_updated_as_by_torch(name, device):
    """Bit for bit, with bf16 parameters in the same group, one of them unfrozen late."""
    generator = torch.Generator().manual_seed(3)
    start = [torch.randn(40, 30, generator=generator), torch.randn(7, generator=generator)]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    half = nn.Parameter(torch.randn(50, generator=generator).bfloat16())
    optimizer = build(name, [ours[0], half, ours[1]], 0.1, device=device)
    plain = build(name, theirs, 0.1, rounds=False, device=device)
    for step in range(5):
        for index in (0, 1) if step > 1 else (0,):
            theirs[index].grad = torch.randn(start[index].shape, generator=generator)
            ours[index].grad = theirs[index].grad.clone()
        half.grad = torch.ones_like(half)
        optimizer.step()
        plain.step()
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
    for key, value in plain.state[theirs[0]].items():
        assert torch.equal(optimizer.state[ours[0]][key], value)


@pytest.mark.parametrize("name", NAMES)
def test_slices_are_bounded_and_change_nothing(name, monkeypatch):
    """The same step in one slice and in many, over parameters of which one is not contiguous.

    Random numbers fall elsewhere, so it is done on numbers that need none: powers of two.
    """
    num_elements = []
    advance = stochastic_rounding.StochasticRounding._step_bucket

    def watched(self, group, bucket, *rest):
        num_elements.append(sum(piece[0].numel() for piece in bucket))
        return advance(self, group, bucket, *rest)

    monkeypatch.setattr(stochastic_rounding.StochasticRounding, "_step_bucket", watched)

    def stepped(size):
        monkeypatch.setattr(stochastic_rounding, "SLICE", size)
        generator = torch.Generator().manual_seed(0)
        shapes = [(3, 5), (64,), (), (17, 9), (1,)]
        starts = [2.0 ** torch.randint(-3, 3, shape, generator=generator) for shape in shapes]
        starts.append(2.0 ** torch.randint(-3, 3, (6, 11), generator=generator).t())
        parameters = [nn.Parameter(start.bfloat16()) for start in starts]
        optimizer = build(name, parameters, lr=0.0)
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p, start in zip(parameters, starts, strict=True):
            assert torch.equal(p.float(), start)
        return [optimizer.state[p].get(key) for p in parameters for key in ("sum", "momentum_buffer")]

    whole = stepped(2**22)
    assert num_elements == [15 + 64 + 1 + 153 + 1 + 66]
    num_elements.clear()
    sliced = stepped(32)
    assert num_elements == [32] * 9 + [12]
    for a, b in zip(whole, sliced, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_non_contiguous_weights_are_updated_in_place():
    plain = nn.Parameter(torch.randn(6, 4).bfloat16())
    turned = nn.Parameter(plain.detach().t().contiguous().t())
    address = turned.data_ptr()
    for p in (plain, turned):
        torch.manual_seed(5)
        optimizer = build("adamw", [p])
        for step in range(3):
            p.grad = torch.full_like(p, 0.5 + step)
            optimizer.step()
    assert torch.equal(plain, turned)
    assert turned.data_ptr() == address
    assert turned.stride() == (1, 6)


@pytest.mark.parametrize("name", NAMES)
def test_resumes_to_the_same_bits(name, tmp_path):
    """The random numbers of the rounding continue."""

    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)).bfloat16()
        model.append(nn.LayerNorm(6))  # stays fp32
        engine = Engine(cpu=True)
        return engine, *engine.prepare(model, build(name, list(model.parameters()), 0.01))

    def steps(run, batches):
        engine, model, optimizer = run
        for x in batches:
            hidden = model[:3](x.bfloat16())
            engine.backward((model[3](hidden.float()) - x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    batches = list(torch.randn(10, 8, 6))
    whole = prepared(1)
    steps(whole, batches[:4])
    whole[0].save_state(tmp_path / "state")
    steps(whole, batches[4:])
    resumed, fresh = prepared(2), prepared(2)
    resumed[0].load_state(tmp_path / "state")
    steps(resumed, batches[4:])
    for ours, theirs in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)
    steps(fresh, batches[4:])
    assert not torch.equal(fresh[1][0].weight, whole[1][0].weight)
    assert resumed[1][0].weight.dtype is torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_and_copies_continue_with_the_same_bits(name):
    p = nn.Parameter(torch.randn(300).bfloat16())
    optimizer = build(name, [p])

    def train(p, optimizer):
        torch.manual_seed(9)
        for _ in range(3):
            p.grad = torch.randn(300).bfloat16()
            optimizer.step()

    train(p, optimizer)
    loaded = nn.Parameter(p.detach().clone())
    other = build(name, [loaded])
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    copied, twin = copy.deepcopy((p, optimizer))
    for a, b in [(p, optimizer), (loaded, other), (copied, twin)]:
        train(a, b)
        assert torch.equal(a, p)


def test_pure_bf16_learns_where_rounding_to_nearest_does_not():
    """Linear regression with a small rate: with weights and state in bf16 alone, against fp32."""

    def loss_after(dtype, rounds):
        torch.manual_seed(0)
        truth, x = 1 + torch.rand(32), torch.randn(256, 32)
        p = nn.Parameter(torch.ones(32, dtype=dtype))
        optimizer = build("adamw", [p], lr=2e-3, rounds=rounds, betas=(0.9, 0.999))
        for _ in range(800):
            error = x @ (p.float() - truth)
            p.grad = (x.t() @ error / 128).to(dtype)
            optimizer.step()
        return error.square().mean().item()

    exact, stochastic, nearest = (
        loss_after(torch.float32, rounds=False),
        loss_after(torch.bfloat16, rounds=True),
        loss_after(torch.bfloat16, rounds=False),
    )
    # it begins at 11; stochastic rounding leaves the noise of weights that alternate between neighbours
    assert exact < 0.05
    assert stochastic < 0.1
    assert nearest > 5


def test_adafactor_is_refused():
    with pytest.raises(RecipeError, match="adafactor cannot round stochastically"):
        build_optimizer("adafactor", [{"params": [nn.Parameter(torch.zeros(2))]}], lr=0.1, rounds_stochastically=True)
