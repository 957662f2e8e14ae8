"""Palettes: k-means against exhaustive search and plain rounding, weights, groups."""

from itertools import combinations

import pytest
import torch

from trimtab.compress.palettes import cluster, find_palettes, look_up, nearest, rows_of_group


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def error_of(values, palette, weights=None):
    distance = (values[:, None] - palette[None]).abs().min(1).values.double().square()
    return (distance if weights is None else distance * weights).sum().item()


def best_error(values, num_values, weights):
    """The error of the best palette, by trying all splits of the sorted values into intervals."""
    order = values.argsort()
    values, weights = values[order].double(), weights[order].double()
    errors = []
    for cuts in combinations(range(1, len(values)), num_values - 1):
        edges, error = [0, *cuts, len(values)], 0.0
        for start, end in zip(edges, edges[1:], strict=False):
            part, weight = values[start:end], weights[start:end]
            error += (weight * (part - (weight * part).sum() / weight.sum()).square()).sum().item()
        errors.append(error)
    return min(errors)


@pytest.mark.parametrize("seed", range(4))
def test_close_to_the_best_palette(seed):
    """Lloyd's algorithm finds a local minimum; from three starts it is within 20% of the global one here."""
    values, weights = normal(14, seed=seed), torch.rand(14, generator=torch.Generator().manual_seed(seed)) + 0.1
    palette = cluster(values[None], 4, weights[None])[0]
    assert error_of(values, palette, weights) <= 1.2 * best_error(values, 4, weights)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_never_worse_than_an_even_grid(bits):
    values = torch.stack([normal(600), normal(600).pow(3), torch.rand(600, generator=torch.Generator().manual_seed(0))])
    palettes = cluster(values, 2**bits)
    assert palettes.shape == (3, 2**bits)
    for row, palette in zip(values, palettes, strict=True):
        grid = torch.linspace(row.min(), row.max(), 2**bits)
        assert error_of(row, palette) < error_of(row, grid)
        assert torch.equal(palette, palette.sort().values)


def test_four_bits_of_normal_values_reach_the_known_optimum():
    """The least distortion of a normal variable with 16 values is 0.009497 (Max, 1960)."""
    values = normal(200_000)
    assert error_of(values, cluster(values[None], 16)[0]) / 200_000 == pytest.approx(0.009497, rel=0.02)


def test_few_distinct_values_are_kept_exactly():
    values = torch.tensor([[3.0, -1.0, 3.0, 0.5, -1.0]])
    palettes = cluster(values, 8)
    indices = nearest(values, palettes, 1)
    assert torch.equal(look_up(indices, palettes, 1), values)
    constant = torch.full((2, 9), 0.25)
    assert torch.equal(look_up(nearest(constant, cluster(constant, 4), 1), cluster(constant, 4), 1), constant)


def test_values_without_importance_do_not_count():
    values = torch.cat([normal(100), normal(100) + 50])[None]
    importance = torch.cat([torch.ones(100), torch.zeros(100)])[None]
    alone, weighted = cluster(values[:, :100], 8), cluster(values, 8, importance)
    assert error_of(values[0, :100], weighted[0]) <= 1.1 * error_of(values[0, :100], alone[0])
    assert torch.equal(cluster(values, 8, importance * 0), cluster(values, 8))


@pytest.mark.parametrize(("per", "num_groups"), [("tensor", 1), ("rows", 3), ("channel", 10)])
def test_groups_of_rows(per, num_groups):
    weight = normal(10, 24) * torch.arange(1, 11)[:, None]
    rows = rows_of_group((10, 24), 3, per, 4)  # the last group has 2 rows
    palettes = find_palettes(weight, 3, rows)
    assert palettes.shape == (num_groups, 8)
    indices = nearest(weight, palettes, rows)
    rounded = look_up(indices, palettes, rows)
    for row in range(10):
        palette = palettes[row // rows]
        assert torch.equal(rounded[row], palette[indices[row].long()])
        assert error_of(weight[row], palette) == pytest.approx((weight - rounded)[row].double().square().sum().item())


def test_the_same_every_time():
    weight = normal(8, 64)
    assert torch.equal(find_palettes(weight, 4, 2), find_palettes(weight.clone(), 4, 2))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("num_columns", [7, 64, 384, 4096])
def test_chosen_groups_add_at_most_a_quarter_of_a_bit(bits, num_columns):
    rows = rows_of_group((10**6, num_columns), bits, "rows")
    assert 16 * 2**bits / (rows * num_columns) <= 0.25
    assert rows == 1 or 16 * 2**bits / ((rows - 1) * num_columns) > 0.25
    assert rows_of_group((5, 7), 8, "rows") == 5
