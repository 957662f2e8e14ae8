"""Clustered modules compute what modules with the decoded weight compute; palettes get the gradient of the weight."""

import pytest
import torch
from torch.nn import functional

from trimtab.compress.clustered_modules import ClusteredEmbedding, ClusteredLinear
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.clustering import ClusterSettings, cluster_weight
from trimtab.compress.error_compensation import output_error


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def clustered(bits=3, scale_block=0):
    return cluster_weight(normal(10, 21), ClusterSettings(bits=bits, rows=4, scale_block=scale_block))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("scale_block", [0, 7, 8, 64])
def test_linear_and_embedding_use_the_decoded_weight(bits, scale_block):
    weight = clustered(bits, scale_block)
    decoded, bias = weight.decoded(torch.float32), torch.nn.Parameter(normal(10, seed=2))
    x, ids = normal(2, 5, 21, seed=1), torch.tensor([[0, 9, 3], [3, 4, 8]])
    linear, embedding = ClusteredLinear(weight, bias), ClusteredEmbedding(weight)
    assert torch.equal(linear(x), functional.linear(x, decoded, bias))
    assert torch.equal(embedding(ids), decoded[ids])
    assert torch.equal(linear.weight, decoded)
    assert linear.weight.shape == (10, 21)


@pytest.mark.parametrize("size", [1e-6, 1e-5, 1e-4, 1e-2, 1.0, 100.0])
@pytest.mark.parametrize("scale_block", [0, 8])
def test_small_weights_are_as_precise_in_fp16_as_decoded_at_once(size, scale_block):
    """The palette and the product with its scale are rounded, so by two units in the last place at most."""
    weight = cluster_weight(normal(10, 21) * size, ClusterSettings(bits=6, rows=4, scale_block=scale_block))
    exact = weight.decoded(torch.float32)
    unit = torch.finfo(torch.float16).eps * exact.abs() + torch.finfo(torch.float16).smallest_normal * 2**-10
    assert bool(((weight.decoded(torch.float16).float() - exact).abs() <= unit / 2).all())
    for found in (
        ClusteredLinear(weight, dtype=torch.float16).weight,
        ClusteredEmbedding(weight, torch.float16)(torch.arange(10)),
    ):
        assert found.dtype is torch.float16
        assert bool(((found.float() - exact).abs() <= unit).all())


def test_scales_that_are_no_whole_numbers_are_kept_in_fp16():
    values = normal(8, 64)
    values[4:] *= 1e-3  # far smaller than the rest of their group: codes of 8 bits would be too coarse
    weight = cluster_weight(values, ClusterSettings(bits=6, rows=8, scale_block=32))
    assert weight.scales_OS.dtype is torch.float16
    exact, found = weight.decoded(torch.float32), ClusteredLinear(weight, dtype=torch.float16).weight.float()
    unit = torch.finfo(torch.float16).eps * exact.abs() + torch.finfo(torch.float16).smallest_normal * 2**-10
    assert bool(((found - exact).abs() <= 1.5 * unit).all())  # here scales are rounded too


def test_a_transposed_weight_is_decoded_as_it_was_stored():
    weight = clustered()
    turned = ClusteredWeight.from_indices(weight.indices(), weight.palettes_GK, 4, transposed=True)
    assert torch.equal(turned.decoded(torch.float32), weight.decoded(torch.float32).T)
    assert ClusteredLinear(turned).weight.shape == (21, 10)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
@pytest.mark.parametrize("scale_block", [0, 8])
def test_the_gradient_of_a_palette_is_the_sum_over_its_entries(kind, scale_block):
    weight = clustered(scale_block=scale_block)
    decoded = weight.decoded(torch.float32).requires_grad_()
    if kind == "linear":
        module, x = ClusteredLinear(weight), normal(6, 21, seed=1)
        expected = functional.linear(x, decoded)
    else:
        module, x = ClusteredEmbedding(weight), torch.tensor([0, 9, 9, 3])
        expected = functional.embedding(x, decoded)
    module.palettes.requires_grad_(True)
    found = module(x)
    factors = normal(*found.shape, seed=3)
    found.backward(factors)
    expected.backward(factors)
    wanted = torch.zeros_like(module.palettes)
    for row, index in enumerate(weight.indices().long()):
        wanted[row // 4].index_add_(0, index, weight.scaled(decoded.grad)[row])
    assert torch.allclose(module.palettes.grad, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.abs().sum() > 0


@pytest.mark.parametrize("scale_block", [0, 16])
def test_compensation_and_refitted_palettes_lower_the_output_error(scale_block):
    x = normal(300, 6, seed=1) @ normal(6, 40, seed=2) + 0.1 * normal(300, 40, seed=3)
    weight, hessian = normal(24, 40), x.T @ x / 300
    errors = []
    for settings in ({}, {"importance": "activations"}, {"importance": "activations", "compensate": True}):
        found = cluster_weight(
            weight, ClusterSettings(bits=2, rows=8, scale_block=scale_block, **settings), hessian_II=hessian
        )
        errors.append(output_error(weight, found.decoded(torch.float32), hessian))
    assert errors[2] < 0.5 * min(errors[:2])


def test_palettes_outside_of_the_range_of_fp16_stay_in_fp32():
    settings = ClusterSettings(bits=4, scale_block=0)
    assert cluster_weight(normal(8, 16), settings).palettes_GK.dtype == torch.float16
    for scale in (1e6, 1e-6):
        found = cluster_weight(normal(8, 16) * scale, settings)
        assert found.palettes_GK.dtype == torch.float32
        assert found.decoded(torch.float32).isfinite().all()


@pytest.mark.slow  # imports bitsandbytes
def test_scales_with_signs_come_closer_than_nf4():
    from trimtab.model.nf4 import Nf4

    pytest.importorskip("bitsandbytes")
    weight = normal(64, 256)
    found = cluster_weight(weight, ClusterSettings(bits=4))
    ours, theirs = (weight - found.decoded(torch.float32)), weight - Nf4(torch.float32, False).rounded(weight)
    assert ours.square().sum() < 0.95 * theirs.square().sum()
    assert 8 * found.num_bytes / weight.numel() < 4.5  # a scale in fp32 for 64 weights


def test_a_block_of_zeros_stays_zero():
    weight = normal(4, 128)
    weight[1, 64:] = 0
    found = cluster_weight(weight, ClusterSettings(bits=4, compensate=True), hessian_II=torch.eye(128))
    decoded = found.decoded(torch.float32)
    assert decoded.isfinite().all()
    assert not decoded[1, 64:].any()
