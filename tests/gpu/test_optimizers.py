"""Optimizers on a GPU: 8-bit state and its paging, bf16 weights rounded by chance in one kernel and in slices."""

import copy

import pytest
import torch
from torch import nn

from trimtab import Engine
from trimtab.optim import stochastic_rounding
from trimtab.optim.build import OPTIMIZERS, PAGED, QUANTIZED, build_optimizer
from trimtab.optim.groups import decay_groups
from trimtab.optim.quantized import is_paged
from trimtab.optim.state_size import StateSize, state_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]
DEVICE = torch.device("cuda", 0)
MIB = 2**20


@pytest.fixture(autouse=True)
def _needs_bitsandbytes(request):
    if "8bit" in request.node.name:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


@pytest.fixture(params=["kernel", "slices"])
def way(request, monkeypatch):
    """Both ways in which bf16 weights are stepped."""
    if request.param == "slices":
        monkeypatch.setattr(stochastic_rounding, "_kernel_for", lambda device: None)
    else:
        pytest.importorskip("triton", reason="needs Triton")
        assert stochastic_rounding._kernel_for(DEVICE) is not None
    return request.param


def train(optimizer, parameters, num_steps, seed):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    for _ in range(num_steps):
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator, device=DEVICE).to(p.dtype)
        optimizer.step()


# ---------------------------------------------------------------------- 8 bits and pages


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_resumes_to_the_same_bits(name, tmp_path):
    """A large matrix (paged where that is asked for), a smaller one, biases; some of it unfrozen after the resume."""

    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 20), nn.Linear(20, 400, bias=False))
        model[2].requires_grad_(False)
        model[2].weight.data.fill_(0.1)
        engine = Engine(device="cuda")
        model = engine.prepare(model)
        groups = decay_groups(model, 0.01, include_frozen=True)
        return engine, model, engine.prepare(build_optimizer(name, groups, lr=0.02, device=DEVICE))

    def steps(run, batches):
        engine, model, optimizer = run
        for x in batches:
            engine.backward((model(x) - x).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    batches = list(torch.randn(8, 16, 400, device=DEVICE))
    whole, resumed = prepared(1), prepared(2)
    steps(whole, batches[:4])
    whole[0].save_state(tmp_path / "state")
    resumed[0].load_state(tmp_path / "state")
    states = resumed[2].state
    assert resumed[1][2].weight not in states
    large = states.get(resumed[1][0].weight)  # plain SGD has none
    if "8bit" in name:
        assert large["state1"].dtype is torch.uint8
        assert is_paged(large["state1"]) is name.startswith(PAGED)
        assert not is_paged(states[resumed[1][1].weight]["state1"])
    for run in (whole, resumed):
        run[1].requires_grad_(True)
        steps(run, batches[4:])
    for ours, theirs in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", QUANTIZED)
def test_paging_changes_no_bit(name):
    results = []
    for prefix in ("", PAGED):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(500, 300, device=DEVICE))
        optimizer = build_optimizer(prefix + name, [{"params": [p], "weight_decay": 0.1}], lr=0.01, device=DEVICE)
        train(optimizer, [p], 5, seed=1)
        assert is_paged(optimizer.state[p]["state1"]) is bool(prefix)
        results.append(p)
    assert torch.equal(*results)


@pytest.mark.parametrize("name", ["adamw8bit", "adam8bit", "adagrad8bit"])
def test_8_bit_is_close_to_fp32(name):
    """Weight decay as torch's optimizer of that name has it, but that the kernel of AdamW decays after its update and
    not before it: lr² · decay apart."""
    start = torch.randn(100, 50, device=DEVICE)
    for num_steps, allowed in [(1, 2e-3 if name == "adamw8bit" else 1e-4), (20, 1.0)]:
        exact, small = nn.Parameter(start.clone()), nn.Parameter(start.clone())
        for p, kind in [(exact, name.removesuffix("8bit")), (small, name)]:
            groups = [{"params": [p], "weight_decay": 0.1}]
            train(build_optimizer(kind, groups, lr=0.01, device=DEVICE), [p], num_steps, seed=2)
        assert (exact - small).abs().max() < allowed * 0.01
    assert (exact - small).abs().mean() < 0.03 * (exact - start).abs().mean()


def test_state_dict_and_copies_of_paged_8bit_state():
    """A copied tensor still says that it is paged, and is not: it has to be made so."""
    p = nn.Parameter(torch.randn(400, 400, device=DEVICE))
    optimizer = build_optimizer("paged-adamw8bit", [{"params": [p]}], lr=0.01, device=DEVICE)
    train(optimizer, [p], 3, seed=3)
    loaded = nn.Parameter(p.detach().clone())
    other = build_optimizer("paged-adamw8bit", [{"params": [loaded]}], lr=0.01, device=DEVICE)
    other.load_state_dict(optimizer.state_dict())
    copied, twin = copy.deepcopy((p, optimizer))
    addresses = {o.state[q]["state1"].data_ptr() for o, q in [(optimizer, p), (other, loaded), (twin, copied)]}
    assert len(addresses) == 3
    for a, b in [(p, optimizer), (loaded, other), (copied, twin)]:
        train(b, [a], 3, seed=4)
        assert torch.equal(a, p)
        assert is_paged(b.state[a]["state1"])


@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_sizes_of_state(name):
    parameters = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in [(10,), (5000,), (400, 400)]]
    optimizer = build_optimizer(name, [{"params": parameters}], lr=0.01, device=DEVICE)
    train(optimizer, parameters, 1, seed=5)
    for p in parameters:
        tensors = [value for value in optimizer.state[p].values() if isinstance(value, torch.Tensor)]
        paged = sum(t.nbytes for t in tensors if is_paged(t))
        device = sum(t.nbytes for t in tensors if t.device == DEVICE)
        host = sum(t.nbytes for t in tensors) - paged - device
        assert state_bytes(name, p.shape, device=DEVICE) == StateSize(device, paged, host)


# ---------------------------------------------------------------------- bf16 weights


@pytest.mark.parametrize("name", ["adamw", "adam", "adagrad", "sgd"])
def test_the_mean_of_many_is_the_exact_step(name, way):
    """Weights and state, and no number strays further than its neighbours."""
    num_copies = 20_000
    p = nn.Parameter(torch.tensor([1.3, -0.7, 0.02], device=DEVICE).bfloat16().repeat(num_copies, 1))
    exact = nn.Parameter(p.detach()[0].double().cpu())
    optimizer, truth = (
        build_optimizer(
            name,
            [{"params": [q], "weight_decay": 0.1}],
            lr=0.01,
            device=q.device,
            momentum=0.9 if name == "sgd" else 0.0,
            rounds_stochastically=rounds,
        )
        for q, rounds in [(p, True), (exact, False)]
    )
    gradient = torch.tensor([0.5, -0.25, 1.0])
    p.grad, exact.grad = gradient.to(DEVICE).bfloat16().repeat(num_copies, 1), gradient.double()
    optimizer.step()
    truth.step()
    results = {"weights": (p.detach(), exact.detach())}
    for key in [key for key in optimizer.state[p] if key != "step"]:
        results[key] = (optimizer.state[p][key], truth.state[exact][key])
    assert len(results) == {"adamw": 3, "adam": 3}.get(name, 2)
    for key, (found, wanted) in results.items():
        assert found.dtype is torch.bfloat16
        spacing = 2.0 ** (wanted.abs().log2().floor() - 7)
        assert ((found.double().cpu() - wanted).abs() <= spacing * 1.001).all(), key
        error = (found.double().mean(0).cpu() - wanted).abs()
        assert (error < 5 * 0.5 * spacing / num_copies**0.5 + 1e-6 * wanted.abs()).all(), key


def test_small_updates_count_and_nan_stays(way):
    """A tenth of the spacing a step for 50 steps; the draws of one step, and of several steps, are independent."""
    p = nn.Parameter(torch.full((100_000,), 1.5, dtype=torch.bfloat16, device=DEVICE))
    optimizer = build_optimizer(
        "adamw", [{"params": [p]}], lr=2.0**-7 / 10, device=DEVICE, rounds_stochastically=True, betas=(0.0, 0.0)
    )
    for _ in range(50):
        p.grad = torch.ones_like(p)
        optimizer.step()
    moved = (1.5 - p.detach().double()) * 2**7
    assert abs(moved.mean() - 5.0) < 5 * (50 * 0.09 / 100_000) ** 0.5
    assert moved.std().item() == pytest.approx((50 * 0.09) ** 0.5, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([moved[:-1], moved[1:]]))[0, 1]) < 5 / 100_000**0.5
    p.grad = torch.full_like(p, float("nan"))
    optimizer.step()
    assert p.isnan().all()


def test_steps_are_bounded_in_memory_and_never_wait(way):
    """80 MiB of bf16 weights: slices of 64 MiB and nothing more, or nothing at all; after the first step no sync."""
    parameters = [nn.Parameter(torch.randn(n, device=DEVICE).bfloat16()) for n in (30 * MIB, 10 * MIB, 77)]
    optimizer = build_optimizer("adamw", [{"params": parameters}], lr=0.01, device=DEVICE, rounds_stochastically=True)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= (1 * MIB if way == "kernel" else 65 * MIB)


def test_rounding_resumes_to_the_same_bits(way, tmp_path):
    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(60, 300), nn.Tanh(), nn.Linear(300, 60)).bfloat16()
        engine = Engine(device="cuda")
        model = engine.prepare(model)
        groups = decay_groups(model, 0.01)
        optimizer = build_optimizer("adamw", groups, lr=0.01, device=DEVICE, rounds_stochastically=True)
        return engine, model, engine.prepare(optimizer)

    def steps(run, batches):
        engine, model, optimizer = run
        for x in batches:
            engine.backward((model(x) - x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

    batches = list(torch.randn(8, 16, 60, device=DEVICE).bfloat16())
    whole = prepared(1)
    steps(whole, batches[:4])
    whole[0].save_state(tmp_path / "state")
    steps(whole, batches[4:])
    resumed = prepared(2)
    resumed[0].load_state(tmp_path / "state")
    steps(resumed, batches[4:])
    for ours, theirs in zip(resumed[1].parameters(), whole[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", QUANTIZED)
def test_bf16_weights_with_8_bit_state(name):
    p = nn.Parameter(torch.full((300, 400), 1.5, dtype=torch.bfloat16, device=DEVICE))
    optimizer = build_optimizer(name, [{"params": [p]}], lr=2.0**-7 / 10, device=DEVICE, rounds_stochastically=True)
    for _ in range(20):
        p.grad = torch.ones_like(p)
        optimizer.step()
    expected = sum(0.1 / (n**0.5 if "adagrad" in name else 1) for n in range(1, 21))
    assert ((1.5 - p.double().mean()) * 2**7).item() == pytest.approx(expected, rel=0.03)


def test_adagrad_has_the_bits_of_torch():
    ours, theirs = (nn.Parameter(torch.ones(300, 40, device=DEVICE)) for _ in range(2))
    optimizer = build_optimizer("adagrad", [{"params": [ours], "weight_decay": 0.1}], lr=0.01, device=DEVICE)
    assert not optimizer.state
    fused = optimizer.param_groups[0]["fused"]
    plain = torch.optim.Adagrad([theirs], lr=0.01, eps=1e-8, weight_decay=0.1, fused=fused)
    train(optimizer, [ours], 5, seed=6)
    train(plain, [theirs], 5, seed=6)
    assert torch.equal(ours, theirs)
