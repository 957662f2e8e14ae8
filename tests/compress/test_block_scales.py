"""Scales of 8 bits: their codes, the search for better ones, and what they cost."""

import pytest
import torch

from trimtab.compress import block_scales
from trimtab.compress.block_scales import BlockScales
from trimtab.compress.clustering import ClusterSettings, cluster_weight
from trimtab.compress.palettes import find_palettes, look_up, nearest


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_of(weight, scales, palettes, rows, importance):
    rounded = look_up(nearest(scales.divided(weight), palettes, rows), palettes, rows) * scales.factors()
    return ((weight - rounded).square() * importance).sum().item()


def test_codes_have_the_sign_of_the_largest_entry_and_use_the_whole_range():
    weight = normal(10, 21)
    codes = BlockScales.of(weight, 8, 4).codes_OS
    assert codes.dtype == torch.int8
    assert codes.shape == (10, 3)
    for row in range(10):
        for block, part in enumerate(weight[row].split(8)):
            assert codes[row, block].sign() == part[part.abs().argmax()].sign()
    assert [codes[group : group + 4].abs().max().item() for group in (0, 4, 8)] == [127, 127, 127]


def test_only_blocks_of_zeros_have_the_code_zero():
    weight = normal(4, 32)
    weight[0, 16:] = 0
    weight[1, 16:] *= 1e-6  # less than half a unit
    weight[2:] = 0
    scales = BlockScales.of(weight, 16, 2)
    assert torch.equal(scales.codes_OS == 0, torch.tensor([[0, 1], [0, 0], [1, 1], [1, 1]]).bool())
    assert scales.divided(weight).isfinite().all()


@pytest.mark.parametrize("max_values", [2**20, 200, 40])  # all rows, whole groups, parts of a group at a time
@pytest.mark.parametrize("bits", [1, 3, 5])
def test_the_search_lowers_the_error_however_it_is_split(monkeypatch, bits, max_values):
    monkeypatch.setattr(block_scales, "_MAX_VALUES", max_values)
    weight, importance, rows = normal(10, 21), normal(10, 21, seed=1).square(), 4
    before = BlockScales.of(weight, 8, rows)
    palettes = find_palettes(before.divided(weight), bits, rows, before.importance(importance))
    after = before.searched(weight, palettes, rows, importance)
    found = error_of(weight, after, palettes, rows, importance)
    assert found < error_of(weight, before, palettes, rows, importance)
    monkeypatch.undo()
    assert torch.equal(after.codes_OS, before.searched(weight, palettes, rows, importance).codes_OS)


def test_palettes_that_are_improved_are_not_worse():
    weight = normal(12, 64)
    start = find_palettes(normal(12, 64, seed=1), 3, 5)
    better = find_palettes(weight, 3, 5, start_GK=start)
    errors = [
        (weight - look_up(nearest(weight, palettes, 5), palettes, 5)).square().sum() for palettes in (start, better)
    ]
    assert better.shape == start.shape
    assert errors[1] < errors[0]


def test_four_bits_cost_no_more_than_nf4_with_double_quantization():
    weight = normal(512, 512)
    found = cluster_weight(weight, ClusterSettings(bits=4))
    assert found.scales_OS.dtype == torch.int8
    assert 8 * found.num_bytes / weight.numel() <= 4 + 8 / 64 + 32 / (64 * 256)


def test_rows_far_smaller_than_others_keep_their_precision():
    """Scales of 8 bits would be coarser than such rows; they are stored in fp16 then."""
    weight = normal(64, 128)
    weight[5] *= 1e-4
    weight[9] *= 100
    clustered = cluster_weight(weight, ClusterSettings(bits=4))
    assert clustered.scales_OS.dtype == torch.float16
    errors = (clustered.decoded(torch.float32) - weight).norm(dim=1) / weight.norm(dim=1)
    assert errors.max() < 0.2
    assert cluster_weight(normal(64, 128), ClusterSettings(bits=4)).scales_OS.dtype == torch.int8
