"""Predicted sizes of optimizer state against the actual state, to the byte."""

import math

import pytest
import torch
from torch import nn

from trimtab.optim.build import OPTIMIZERS, PAGED, build_optimizer
from trimtab.optim.quantized import MIN_PAGED
from trimtab.optim.state_size import StateSize, state_bytes

SHAPES = [(), (7,), (4095,), (4096,), (63, 65), (65, 64), (3, 40, 50)]
CASES = [(name, 0.0, False) for name in OPTIMIZERS] + [
    ("sgd", 0.9, False),
    *((name, 0.0, True) for name in ("adamw", "adam", "adagrad", "sgd")),
    ("sgd", 0.9, True),
]


@pytest.fixture(autouse=True)
def _needs_bitsandbytes(request):
    if "8bit" in request.node.name:
        pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "momentum", "rounds"), CASES)
def test_equals_the_size_of_the_actual_state(name, momentum, rounds, dtype):
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    optimizer = build_optimizer(
        name, [{"params": parameters}], lr=0.1, momentum=momentum, device="cpu", rounds_stochastically=rounds
    )
    for p in parameters:
        p.grad = torch.ones_like(p)
    optimizer.step()
    for p in parameters:
        settings = {"momentum": momentum, "rounds_stochastically": rounds, "device": "cpu"}
        num_bytes = sum(v.nbytes for v in optimizer.state[p].values() if isinstance(v, torch.Tensor))
        assert state_bytes(name, p.shape, dtype, **settings).num_bytes == num_bytes


@pytest.mark.parametrize(
    ("name", "shape", "device", "size"),
    [
        ("adamw", (1000, 10), "cuda", StateSize(device_bytes=2 * 40_000 + 4)),
        ("sgd", (1000, 10), "cuda", StateSize()),
        ("adamw8bit", (1000, 1000), "cuda", StateSize(device_bytes=2 * (1_000_000 + 3907 * 4))),
        ("paged-adamw8bit", (1000, 1000), "cuda", StateSize(2 * 3907 * 4, paged_bytes=2_000_000)),
        ("paged-adagrad8bit", (1000, 1000), "cuda", StateSize(3907 * 4, paged_bytes=1_000_000)),
        ("paged-adamw8bit", (1000, 1000), "cpu", StateSize(2 * (1_000_000 + 3907 * 4))),
        ("paged-adamw8bit", (MIN_PAGED - 1,), "cuda", StateSize(2 * (MIN_PAGED - 1 + 391 * 4))),
        ("paged-adam8bit", (4095,), "cuda", StateSize(2 * 4095 * 4)),
        ("adafactor", (1000, 10), "cuda", StateSize(4040, host_bytes=4)),
    ],
)
def test_size_by_place(name, shape, device, size):
    assert state_bytes(name, shape, device=device) == size


def test_sizes_add_up():
    total = sum((state_bytes(PAGED + "adamw8bit", shape) for shape in [(10,), (400, 400)]), StateSize())
    assert total == StateSize(80 + 2 * 625 * 4, 320_000)
    assert total.num_bytes == 80 + 5000 + 320_000


def test_state_in_bf16_is_half_of_that_in_fp32():
    shape = (100, 100)
    half = state_bytes("adamw", shape, torch.bfloat16, rounds_stochastically=True).num_bytes
    assert half == 2 * 2 * math.prod(shape)
    assert state_bytes("adamw", shape).num_bytes == 2 * 4 * math.prod(shape) + 4


def test_unknown_names():
    with pytest.raises(ValueError, match="unknown optimizer 'lion'"):
        state_bytes("lion", (3,))
