"""The Triton kernel for Adam with 8-bit state: against a plain reference, bitsandbytes' kernels, and itself resumed.

Without a GPU these tests run in Triton's interpreter: `TRITON_INTERPRET=1`, with triton installed.
"""

import copy
import os

import pytest
import torch
from torch import nn

from trimtab.optim import quantized
from trimtab.optim.build import build_optimizer

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() and not IS_INTERPRETED, reason="needs a CUDA device"),
]
DEVICE = torch.device("cpu") if IS_INTERPRETED else torch.device("cuda", 0)
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def kernel(monkeypatch):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    pytest.importorskip("triton", reason="needs Triton")
    if IS_INTERPRETED:
        from trimtab.optim import quantized_kernel  # noqa: PLC0415

        monkeypatch.setattr(quantized, "_kernel_for", lambda device: quantized_kernel)
    found = quantized._kernel_for(DEVICE)
    assert found is not None
    return found


def maps():
    functions = quantized.bitsandbytes_functions()
    return [functions.create_dynamic_map(signed=signed).to(DEVICE) for signed in (True, False)]


def generator(seed):
    return torch.Generator(DEVICE).manual_seed(seed)


def normal(num, seed, spread=0.0):
    values = torch.randn(num, device=DEVICE, generator=generator(seed))
    return values * torch.exp(spread * torch.randn(num, device=DEVICE, generator=generator(seed + 1000)))


def moments(num, seed):
    """Random codes, and a scale for every 256 elements."""
    codes = [
        torch.randint(0, 256, (num,), dtype=torch.uint8, device=DEVICE, generator=generator(seed + n)) for n in (0, 1)
    ]
    scales = [torch.rand(-(-num // 256), device=DEVICE, generator=generator(seed + n)) + 0.1 for n in (2, 3)]
    return [*codes, *scales]


def reference(weights, gradient, state, step, decouples):
    """Adam in fp64: new weights, codes and scales."""
    signed, unsigned = (table.double() for table in maps())
    num = weights.numel()

    def rows(tensor):
        return nn.functional.pad(tensor.double(), (0, -num % 256)).view(-1, 256)

    w, g = rows(weights), rows(gradient)
    beta1, beta2 = OPTIONS["betas"]
    lr, decay = OPTIONS["lr"], OPTIONS["weight_decay"]
    if not decouples:
        g = g + decay * w
    m = beta1 * rows(signed[state[0].long()]) * state[2].double()[:, None] + (1 - beta1) * g
    v = beta2 * rows(unsigned[state[1].long()]) * state[3].double()[:, None] + (1 - beta2) * g * g
    update = lr / (1 - beta1**step) * m / ((v / (1 - beta2**step)).sqrt() + OPTIONS["eps"])
    w = w * (1 - lr * decay if decouples else 1) - update
    scales = [m.abs().amax(1), v.amax(1)]
    codes = [
        torch.bucketize((moment / scale[:, None]).contiguous(), (table[1:] + table[:-1]) / 2)
        for moment, scale, table in zip((m, v), scales, (signed, unsigned), strict=True)
    ]
    return [w.flatten()[:num], *(code.flatten()[:num] for code in codes), *scales]


@pytest.mark.parametrize("decouples", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num", [1, 255, 256, 257, 5000])
def test_one_step_equals_the_reference(kernel, num, dtype, decouples):
    """Codes are the nearest ones; few may differ by one, where a moment is in the middle of two values."""
    for spread in (0.0, 4.0):  # moments of one size, and of all sizes that 8 bits have
        weights, gradient = normal(num, 1).to(dtype), normal(num, 2, spread).to(dtype)
        state = moments(num, 3)
        expected = reference(weights, gradient, state, 3, decouples)
        kernel.step_adam([weights, gradient, *state], maps(), 3, **OPTIONS, decouples=decouples, seed=None)
        error = 2**-7 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(weights.double(), expected[0], rtol=error, atol=1e-6)
        for ours, theirs in zip(state[:2], expected[1:3], strict=True):
            difference = (ours.long() - theirs).abs()
            assert difference.max() <= 1
            assert difference.float().mean() < 0.001
        for ours, theirs in zip(state[2:], expected[3:], strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=0)


def test_every_value_of_the_map_is_found_again(kernel):
    """With rates of one nothing changes but by quantization: the codes stay."""
    signed, unsigned = maps()
    state = [torch.arange(256, dtype=torch.uint8, device=DEVICE) for _ in range(2)]
    state += [torch.full((1,), scale, device=DEVICE) for scale in (0.3, 7.0)]
    weights, gradient = torch.zeros(256, device=DEVICE), torch.zeros(256, device=DEVICE)
    kernel.step_adam(
        [weights, gradient, *state],
        [signed, unsigned],
        1,
        **{**OPTIONS, "betas": (1 - 1e-9, 1 - 1e-9), "lr": 0.0},
        decouples=True,
        seed=None,
    )
    assert state[0].tolist() == state[1].tolist() == list(range(256))
    assert [round(scale.item(), 4) for scale in state[2:]] == [0.3, 7.0]


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("cls", [quantized.AdamW8bit, quantized.Adam8bit])
def test_close_to_the_kernels_of_bitsandbytes(kernel, monkeypatch, cls, num_steps):
    """bf16 weights, rounded to nearest: after one step codes differ by one where a moment is between two values.

    Later a moment may be a small difference of large numbers, so values are compared with the scale of their block.
    """
    results = []
    for found in (kernel, None):
        monkeypatch.setattr(quantized, "_kernel_for", lambda device, found=found: found)
        parameter = nn.Parameter(normal(70 * 130, 5).view(70, 130).bfloat16())
        optimizer = cls([parameter], lr=0.01, weight_decay=0.1)
        for step in range(num_steps):
            parameter.grad = normal(70 * 130, 6 + step).view(70, 130).bfloat16()
            optimizer.step()
        results.append((parameter.detach().float(), optimizer.state[parameter]))
    (ours, state), (theirs, other) = results
    num_roundings = num_steps if IS_INTERPRETED else 1  # the interpreter truncates to bf16
    assert (ours - theirs).abs().max() <= num_roundings * 2**-7 * ours.abs().max()
    assert IS_INTERPRETED or (ours != theirs).float().mean() < 0.05
    for key, table in zip(("state1", "state2"), maps(), strict=True):
        codes = [one[key].long() for one in (state, other)]
        if key == "state2" and IS_INTERPRETED:  # on a CPU, bitsandbytes does not tell the smallest values apart
            codes = [code.clamp(min=16) for code in codes]
        difference = (codes[0] - codes[1]).abs()
        assert num_steps > 1 or difference.max() <= 1
        assert (difference > 0).float().mean() < 0.1
        assert (table[codes[0]] - table[codes[1]]).abs().max() < 0.03
    for key in ("absmax1", "absmax2"):
        torch.testing.assert_close(state[key], other[key], rtol=0.02, atol=0)


def test_stochastic_rounding_is_right_in_the_mean_and_independent(kernel):
    num = 256 * 400
    weights, gradient = (torch.ones(num, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))

    def step(seed, *, parts=1):
        changed = weights.clone()
        fresh = [torch.full((num,), 127, device=DEVICE), torch.zeros(num, device=DEVICE)]
        state = [*(code.to(torch.uint8) for code in fresh), *(torch.zeros(400, device=DEVICE) for _ in range(2))]
        options = {**OPTIONS, "lr": 0.001, "weight_decay": 0.0}
        for begin in range(0, num, num // parts):
            here = slice(begin, begin + num // parts)
            blocks = slice(here.start // 256, here.stop // 256)
            tensors = [changed[here], gradient[here], *(s[here] for s in state[:2]), *(s[blocks] for s in state[2:])]
            kernel.step_adam(tensors, maps(), 1, **options, decouples=True, seed=seed, begin=begin)
        return changed

    first, second = step(2**62), step(2**62 + 1)
    down = (first < 1).float()
    assert first.unique().numel() == 2
    assert first.float().mean().item() == pytest.approx(0.999, abs=1e-4)  # one step of bf16 is 0.0039
    share = down.mean()
    for other in (down.roll(1), down.roll(256), (second < 1).float()):
        assert (down * other).mean().item() == pytest.approx((share * share).item(), abs=0.01)
    assert torch.equal(step(2**62), first)
    assert torch.equal(step(2**62, parts=4), first)  # parts draw what the whole draws


def test_nan_and_infinity(kernel):
    """A weight that is NaN stays it; one whose gradient is not finite stays as it is, and harms no other."""
    num = 600
    weights, gradient = normal(num, 1).bfloat16(), normal(num, 2).bfloat16()
    weights[3] = float("nan")
    gradient[5], gradient[300] = float("nan"), float("inf")
    before, state = weights.clone(), moments(num, 3)
    kernel.step_adam([weights, gradient, *state], maps(), 1, **OPTIONS, decouples=True, seed=2**62)
    assert weights[3].isnan()
    assert torch.equal(weights[[5, 300]], before[[5, 300]])
    assert weights.isnan().sum() == 1
    assert all(scale.isfinite().all() for scale in state[2:])
    assert state[0][5] == state[0][300] == 127
    assert state[1][5] == state[1][300] == 0


@pytest.mark.parametrize("with_kernel", [True, False])
def test_resumes_to_the_bit_and_in_the_other_way(kernel, monkeypatch, with_kernel):
    """What one way saved, the other one loads."""

    def train(parameters, optimizer, steps):
        for number in steps:
            for index, parameter in enumerate(parameters):
                parameter.grad = normal(parameter.numel(), 10 * number + index).view_as(parameter).bfloat16()
            optimizer.step()

    def build(parameters):
        groups = [{"params": parameters, "weight_decay": 0.1}]
        return build_optimizer("adamw8bit", groups, lr=0.01, device=DEVICE, rounds_stochastically=True)

    def parameters():
        return [nn.Parameter(normal(num, num).bfloat16()) for num in (5000, 8192, 100)]

    whole, resumed = parameters(), parameters()
    optimizer, other = build(whole), build(resumed)
    train(whole, optimizer, range(3))
    with torch.no_grad():
        for ours, theirs in zip(resumed, whole, strict=True):
            ours.copy_(theirs)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(whole, optimizer, range(3, 6))
    if not with_kernel:
        monkeypatch.setattr(quantized, "_kernel_for", lambda device: None)
    train(resumed, other, range(3, 6))
    for ours, theirs in zip(resumed, whole, strict=True):
        assert torch.equal(ours, theirs) if with_kernel else (ours - theirs).abs().max() < 0.1
