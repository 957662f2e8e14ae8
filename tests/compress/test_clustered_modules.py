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


def clustered(bits=3, shape=(10, 21), **settings):
    return cluster_weight(normal(*shape), ClusterSettings(bits=bits, rows=4, **settings))


@pytest.mark.parametrize("bits", range(1, 9))
def test_linear_and_embedding_use_the_decoded_weight(bits):
    weight = clustered(bits)
    decoded, bias = weight.decoded(torch.float32), torch.nn.Parameter(normal(10, seed=2))
    x, ids = normal(2, 5, 21, seed=1), torch.tensor([[0, 9, 3], [3, 4, 8]])
    linear, embedding = ClusteredLinear(weight, bias), ClusteredEmbedding(weight)
    assert torch.equal(linear(x), functional.linear(x, decoded, bias))
    assert torch.equal(embedding(ids), decoded[ids])
    assert torch.equal(linear.weight, decoded)
    assert linear.weight.shape == (10, 21)


def test_a_transposed_weight_is_decoded_as_it_was_stored():
    weight = clustered()
    turned = ClusteredWeight.from_indices(weight.indices(), weight.palettes_GK, 3, 4, transposed=True)
    assert torch.equal(turned.decoded(torch.float32), weight.decoded(torch.float32).T)
    assert ClusteredLinear(turned).weight.shape == (21, 10)


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_the_gradient_of_a_palette_is_the_sum_over_its_entries(kind):
    weight = clustered()
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
        wanted[row // 4].index_add_(0, index, decoded.grad[row])
    assert torch.allclose(module.palettes.grad, wanted, rtol=1e-5, atol=1e-5)
    assert wanted.abs().sum() > 0


def test_compensation_and_refitted_palettes_lower_the_output_error():
    x = normal(300, 6, seed=1) @ normal(6, 40, seed=2) + 0.1 * normal(300, 40, seed=3)
    weight, hessian = normal(24, 40), x.T @ x / 300
    errors = []
    for settings in ({}, {"importance": "activations"}, {"importance": "activations", "compensate": True}):
        found = cluster_weight(weight, ClusterSettings(bits=2, rows=8, **settings), hessian_II=hessian)
        errors.append(output_error(weight, found.decoded(torch.float32), hessian))
    assert errors[2] < 0.5 * min(errors[:2])


def test_palettes_outside_of_the_range_of_fp16_stay_in_fp32():
    settings = ClusterSettings(bits=4)
    assert cluster_weight(normal(8, 16), settings).palettes_GK.dtype == torch.float16
    for scale in (1e6, 1e-6):
        found = cluster_weight(normal(8, 16) * scale, settings)
        assert found.palettes_GK.dtype == torch.float32
        assert found.decoded(torch.float32).isfinite().all()
