"""CUDA's autocast on tensors without data: the formats that torch documents, and one copy of a weight for a forward.

Where the CPU's autocast has the same rule it is asked; its lists are shorter, so the rest is held against the list in
torch's documentation of CUDA's.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trimtab.planner.trace.autocast import autocast_on_stand_in
from trimtab.planner.trace.cuda import CudaRules, Gpu, as_on_cuda
from trimtab.planner.trace.recorder import Recorder

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def empty(*shape, dtype=FP32, device="meta", **more):
    return torch.zeros(shape, dtype=dtype, device=device, **more)


PRODUCTS = {
    "linear": lambda x: functional.linear(x, empty(8, 8, device=x.device), empty(8, device=x.device)),
    "matmul": lambda x: torch.matmul(x, empty(8, 8, device=x.device)),
    "@": lambda x: x @ empty(8, 8, device=x.device),
    "mm": lambda x: torch.mm(x, empty(8, 8, device=x.device)),
    "bmm": lambda x: torch.bmm(x[None], empty(1, 8, 8, device=x.device)),
    "addmm": lambda x: torch.addmm(empty(8, device=x.device), x, empty(8, 8, device=x.device)),
    "baddbmm": lambda x: torch.baddbmm(empty(1, 4, 8, device=x.device), x[None], empty(1, 8, 8, device=x.device)),
    "conv1d": lambda x: functional.conv1d(x[None], empty(2, 4, 3, device=x.device)),
    "conv2d": lambda x: functional.conv2d(x[None], empty(2, 1, 3, 3, device=x.device)),
    "conv3d": lambda x: functional.conv3d(x[None, None], empty(2, 1, 1, 3, 3, device=x.device)),
    "conv_transpose2d": lambda x: functional.conv_transpose2d(x[None], empty(1, 2, 3, 3, device=x.device)),
}
WIDE = {
    "softmax": lambda x: functional.softmax(x, -1),
    "torch.softmax": lambda x: torch.softmax(x, dim=-1),
    "x.softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: functional.log_softmax(x, dim=-1),
    "layer_norm": lambda x: functional.layer_norm(x, (8,), empty(8), empty(8)),
    "group_norm": lambda x: functional.group_norm(x, 2),
    "cross_entropy": lambda x: functional.cross_entropy(x, empty(4, dtype=torch.long)),
    "nll_loss": lambda x: functional.nll_loss(x, empty(4, dtype=torch.long)),
    "mse_loss": lambda x: functional.mse_loss(x, empty(4, 8, dtype=x.dtype)),
    "binary_cross_entropy_with_logits": lambda x: functional.binary_cross_entropy_with_logits(x, empty(4, 8)),
    "kl_div": lambda x: functional.kl_div(x, x, reduction="batchmean"),
    "sum": lambda x: x.sum(),
    "torch.sum": lambda x: torch.sum(x, -1),
    "cumsum": lambda x: torch.cumsum(x, 0),
    "prod": lambda x: x.prod(),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "rsqrt": torch.rsqrt,
    "exp": lambda x: x.exp(),
    "log": torch.log,
    "norm": lambda x: x.norm(),
    "softplus": functional.softplus,
    "reciprocal": torch.reciprocal,
}
AS_THEY_COME = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "*": lambda x: x * 2,
    "mean": lambda x: x.mean(),
    "transpose": lambda x: x.t(),
    "cat": lambda x: torch.cat([x, x]),
    "embedding": lambda x: functional.embedding(empty(3, dtype=torch.long), x),
}


@pytest.fixture(autouse=True)
def _stood_in():
    with autocast_on_stand_in():
        yield


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_run_in_half_precision(name, dtype):
    with torch.autocast("cuda", dtype=dtype):
        for given in (FP32, dtype):
            assert PRODUCTS[name](empty(4, 8, dtype=given)).dtype is dtype
    assert PRODUCTS[name](empty(4, 8)).dtype is FP32, "and outside they do not"


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_autocast_of_the_cpu_says_the_same_of_products(name):
    with torch.autocast("cpu", dtype=BF16):
        really = PRODUCTS[name](empty(4, 8, device="cpu"))
    with torch.autocast("cuda", dtype=BF16):
        stood_in = PRODUCTS[name](empty(4, 8))
    assert (stood_in.dtype, stood_in.shape) == (really.dtype, really.shape)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("name", WIDE)
def test_what_needs_it_runs_in_fp32(name, dtype):
    with torch.autocast("cuda", dtype=dtype):
        assert WIDE[name](empty(4, 8, dtype=dtype)).dtype is FP32
        assert WIDE[name](empty(4, 8)).dtype is FP32


@pytest.mark.parametrize("name", AS_THEY_COME)
def test_everything_else_keeps_its_format(name):
    with torch.autocast("cuda", dtype=BF16):
        for dtype in (BF16, FP32):
            assert AS_THEY_COME[name](empty(4, 8, dtype=dtype)).dtype is dtype


def test_sums_of_two_formats_are_in_the_wider():
    with torch.autocast("cuda", dtype=BF16):
        assert (empty(4, dtype=BF16) + empty(4)).dtype is FP32
        assert torch.addcmul(empty(4), empty(4, dtype=BF16), empty(4, dtype=BF16)).dtype is FP32


def test_the_shape_of_a_softmax_and_a_format_that_is_asked_for_are_kept():
    with torch.autocast("cuda", dtype=FP16):
        x = empty(4, 8, dtype=FP16)
        assert functional.softmax(x, dim=-1).shape == (4, 8)
        assert functional.softmax(x, dim=-1, dtype=FP16).dtype is FP16
        assert x.sum(dtype=FP16).dtype is FP16


def test_gradients_have_the_format_of_the_weights():
    weight = nn.Parameter(empty(8, 8))
    with torch.autocast("cuda", dtype=BF16):
        loss = functional.linear(empty(4, 8), weight).sum()
    assert loss.dtype is FP32
    loss.backward()
    assert weight.grad.dtype is FP32


def test_switched_off_inside_it_is_on_again_after():
    x = empty(4, 8)
    with torch.autocast("cuda", dtype=BF16):
        with torch.autocast("cuda", enabled=False):
            assert PRODUCTS["linear"](x).dtype is FP32
            assert not torch.is_autocast_enabled("cuda")
        assert PRODUCTS["linear"](x).dtype is BF16
        assert torch.is_autocast_enabled("cuda")
        assert torch.get_autocast_dtype("cuda") is BF16
    assert not torch.is_autocast_enabled("cuda")


def test_it_is_a_decorator_too():
    @torch.autocast("cuda", dtype=BF16)
    def product(x):
        return PRODUCTS["linear"](x)

    assert product(empty(4, 8)).dtype is BF16


def test_the_autocast_of_the_cpu_is_left_alone():
    with torch.autocast("cpu", dtype=BF16):
        assert PRODUCTS["linear"](torch.zeros(4, 8)).dtype is BF16
        assert torch.is_autocast_enabled("cpu")
    assert PRODUCTS["linear"](torch.zeros(4, 8)).dtype is FP32


# ---------------------------------------------------------------------- copies of weights


@pytest.fixture
def recorder():
    with as_on_cuda(Gpu()):
        yield Recorder(CudaRules(Gpu()), lambda tensor: 0)


WEIGHT = 16 * 16 * 2  # bytes of a copy


def copies(recorder):
    """How many copies of the weight were made, and how many of them live."""
    made = {number for number, birth in recorder.births.items() if birth.op == "aten._to_copy" and birth.size == WEIGHT}
    dead = {storage for storage, size in recorder.events if not size}
    return len(made), len(made - dead)


def test_a_weight_is_copied_once_in_a_forward_and_the_copy_goes_with_it(recorder):
    weight = nn.Parameter(empty(16, 16))
    with recorder:
        with torch.no_grad(), torch.autocast("cuda", dtype=BF16):
            x = functional.linear(empty(3, 16), weight)
            functional.linear(x, weight)
            assert copies(recorder) == (1, 1)
        assert copies(recorder) == (1, 0)
        with torch.no_grad(), torch.autocast("cuda", dtype=BF16):
            functional.linear(x, weight)
        assert copies(recorder) == (2, 0), "the next forward makes its own"


def test_the_graph_holds_a_copy_until_backward_is_through(recorder):
    weight = nn.Parameter(empty(16, 16))
    x = empty(3, 16, dtype=BF16, requires_grad=True)
    with recorder:
        with torch.autocast("cuda", dtype=BF16):
            loss = functional.linear(x, weight).sum()
        assert copies(recorder) == (1, 1)
        with recorder.during("backward"):
            loss.backward()
        assert copies(recorder)[1] == 0


def test_what_is_no_weight_is_copied_each_time(recorder):
    frozen, weight = empty(16, 16), nn.Parameter(empty(16, 16))
    with recorder, torch.no_grad(), torch.autocast("cuda", dtype=BF16):
        for number in (1, 2):
            functional.linear(empty(3, 16), frozen)
            assert copies(recorder) == (number, 0)
        functional.linear(empty(3, 16), weight[:])
        assert copies(recorder) == (3, 0), "nor are copies of views kept"


def test_what_is_in_half_precision_already_is_not_copied(recorder):
    weight = nn.Parameter(empty(16, 16, dtype=BF16))
    with recorder, torch.autocast("cuda", dtype=BF16):
        functional.linear(empty(3, 16, dtype=BF16), weight)
    assert copies(recorder) == (0, 0)


def test_recomputation_casts_again(recorder):
    weight = nn.Parameter(empty(16, 16))
    with recorder:
        with torch.autocast("cuda", dtype=BF16):
            made = checkpoint(lambda x: torch.tanh(functional.linear(x, weight)), empty(3, 16), use_reentrant=False)
            loss = made.sum()
        assert copies(recorder) == (1, 0), "the graph of a recomputed block holds none"
        with recorder.during("backward"):
            loss.backward()
    assert copies(recorder)[0] == 2
    assert {op.dtype for op in recorder.ops if op.name == "aten.mm"} == {"bf16"}
