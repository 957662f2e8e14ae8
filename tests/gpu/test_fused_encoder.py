"""The kernels between the products of an encoder's block, against the same operations in torch on a CPU."""

import pytest
import torch

from rounding import rounding_error
from trimtab.model import fused_encoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = [(33, 768), (1, 768), (700, 384), (129, 1024), (64, 50)]
HALF = [torch.bfloat16, torch.float16]


def assert_same(found, expected, num_roundings=4):
    """Sums of products in another order, and one rounding to the dtype of the result."""
    eps = torch.finfo(found.dtype).eps
    wanted = expected.double()
    bound = eps * wanted.abs() + rounding_error(wanted, num_roundings * 8, torch.float32)
    assert found.dtype == expected.dtype
    assert bool(((found.cpu().double() - wanted).abs() <= bound).all())


def both(operation, *args):
    results = []
    for device in ("cpu", "cuda"):
        moved = [arg.to(device) if isinstance(arg, torch.Tensor) else arg for arg in args]
        result = operation(*moved)
        results.append(result if isinstance(result, tuple) else (result,))
    return results


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_norm_of_a_sum(size, dropout, dtype, residual_dtype):
    draw = torch.Generator().manual_seed(0)
    x, bias = torch.randn(size, generator=draw).to(dtype), torch.randn(size[1], generator=draw).to(dtype)
    residual = torch.randn(size, generator=draw).to(residual_dtype)
    gain, offset = torch.rand(size[1], generator=draw) + 0.5, torch.randn(size[1], generator=draw)
    seed = torch.randint(2**62, (1,), generator=draw)
    args = (x, bias, residual, gain, offset, seed, dropout, 1e-12, torch.float32, torch.float32, dtype)
    expected, found = both(fused_encoder._norm_forward, *args)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    grad, statistics = torch.randn(size, generator=draw), expected[2:]
    for grads in ((grad, None), (None, grad.to(dtype)), (grad, grad.to(dtype))):
        args = (*grads, *statistics, gain, seed, dropout, dtype, residual_dtype)
        expected, found = both(fused_encoder._norm_backward, *args)
        for one, other in zip(found[:2], expected[:2], strict=True):
            assert_same(one, other)
        # sums of as many rounded numbers as there are tokens
        torch.testing.assert_close(found[2].cpu(), expected[2], rtol=0, atol=rounding_error(grad, 4 * size[0], dtype))


@pytest.mark.parametrize("size", [(33, 3072), (700, 1536), (5, 50)], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_gelu(size, dtype):
    draw = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(size, generator=draw).to(dtype) for _ in range(2))
    bias = torch.randn(size[1], generator=draw).to(dtype)
    expected, found = both(fused_encoder._gelu_forward, x, bias)
    assert_same(found[0], expected[0])
    expected, found = both(fused_encoder._gelu_backward, grad, x, bias)
    assert_same(found[0], expected[0])
    torch.testing.assert_close(found[1].cpu(), expected[1], rtol=0, atol=rounding_error(grad, 4 * size[0], dtype))


def test_dropout_keeps_the_same_numbers():
    seed = torch.tensor([1234567890123456789 % 2**62])
    x, ones = torch.ones(100, 768), torch.ones(768)
    args = (x, None, torch.zeros_like(x), ones, ones, seed, 0.25, 1e-12, torch.float32, torch.float32, None)
    expected, found = both(fused_encoder._norm_forward, *args)
    assert torch.equal(found[2].cpu() > 0, expected[2] > 0)
    assert abs(float((found[2] > 0).float().mean()) - 0.75) < 0.01
