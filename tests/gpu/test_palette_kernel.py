"""The kernel that multiplies from packed indices, on a GPU: against the decoded weight."""

import pytest
import torch

from trimtab.compress.clustered_modules import ClusteredLinear
from trimtab.compress.clustering import ClusterSettings, cluster_weight
from trimtab.compress.palette_product import MAX_ROWS, palette_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


@pytest.fixture(autouse=True)
def _triton():
    pytest.importorskip("triton", reason="needs Triton")


def module_of(bits, shape, scale_block, dtype):
    torch.manual_seed(0)
    weight = cluster_weight(torch.randn(*shape), ClusterSettings(bits=bits, rows=5, scale_block=scale_block))
    return ClusteredLinear(weight, torch.nn.Parameter(torch.randn(shape[0])), dtype).to("cuda", dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", [(16, 64), (384, 1536), (37, 101)])
@pytest.mark.parametrize("scale_block", [0, 64])
@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
def test_equal_to_the_product_with_the_decoded_weight(bits, shape, scale_block, num_rows):
    module = module_of(bits, shape, scale_block, torch.float32)
    x = torch.randn(num_rows, shape[1], device="cuda")
    with torch.no_grad():
        found = palette_product(x, module.clustered)
        assert found is not None
        wanted = x.double() @ module.weight.double().T
        bound = shape[1] * torch.finfo(torch.float32).eps * (x.double().abs() @ module.weight.double().abs().T)
        assert bool(((found.double() - wanted).abs() <= bound).all())
        assert torch.equal(module(x), found + module.bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_fp32(dtype):
    module = module_of(4, (384, 1536), 64, dtype)
    x = torch.randn(1, 3, 1536, device="cuda", dtype=dtype)
    with torch.no_grad():
        found = palette_product(x, module.clustered)
        of = module.clustered
        exact = of.with_palettes(of.palettes_GK.double()).matrix()
        wanted = x.double() @ exact.T
    bound = torch.finfo(dtype).eps * wanted.abs() + 1536 * 2**-23 * (x.double().abs() @ exact.abs().T)
    assert found.shape == (1, 3, 384)
    assert bool(((found.double() - wanted).abs() <= bound).all())


def test_what_the_kernel_does_not_compute_is_decoded():
    module = module_of(3, (16, 64), 64, torch.float32)  # an index of 3 bits can lie in two bytes
    x = torch.randn(1, 64, device="cuda")
    assert palette_product(x, module.clustered) is None
    assert palette_product(torch.randn(MAX_ROWS + 1, 64, device="cuda"), module.clustered) is None
    assert module(x).shape == (1, 16)
