"""Rounding with compensation against plain rounding: the error of the outputs on correlated inputs."""

import pytest
import torch

from trimtab.compress.error_compensation import compensated, inverse_factor, output_error


def to_grid(values, _first_column):
    return (values * 4).round() / 4


def correlated_inputs(num_inputs=48, num_rows=400, rank=8):
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(num_rows, rank, generator=generator) @ torch.randn(rank, num_inputs, generator=generator)
    return mixed + 0.1 * torch.randn(num_rows, num_inputs, generator=generator)


def weight_of(num_outputs=20, num_inputs=48):
    return torch.randn(num_outputs, num_inputs, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("block", [1, 7, 48, 128])
def test_the_output_error_is_far_below_plain_rounding(block):
    x, weight = correlated_inputs(), weight_of()
    rounded = compensated(weight, x.T @ x, to_grid, block=block)
    assert torch.equal(rounded, to_grid(rounded, 0))
    plain, ours = ((x @ (weight - each).T).square().sum() for each in (to_grid(weight, 0), rounded))
    assert ours < 0.5 * plain


def test_output_error_is_the_error_of_the_outputs():
    x, weight = correlated_inputs().double(), weight_of().double()
    rounded = to_grid(weight, 0)
    found = output_error(weight, rounded, x.T @ x)
    wanted = (x @ (weight - rounded).T).square().sum().item()
    assert abs(found - wanted) <= 1e-10 * wanted


def test_independent_inputs_are_rounded_plainly():
    weight = weight_of()
    assert torch.equal(compensated(weight, torch.eye(48), to_grid), to_grid(weight, 0))


def test_columns_are_given_in_order():
    seen = []

    def remember(values, first_column):
        seen.append((first_column, tuple(values.shape)))
        return values

    weight = weight_of()
    x = correlated_inputs()
    assert torch.equal(compensated(weight, x.T @ x, remember, block=7), weight)  # nothing rounded, nothing changed
    assert seen == [(column, (20, 1)) for column in range(48)]


def test_an_input_that_is_never_used_changes_nothing_else():
    x, weight = correlated_inputs(), weight_of()
    x[:, 5] = 0
    rounded = compensated(weight, x.T @ x, to_grid)
    assert rounded.isfinite().all()
    assert torch.equal(rounded[:, 5], to_grid(weight, 0)[:, 5])


@pytest.mark.parametrize("hessian", [torch.zeros(6, 6), torch.full((6, 6), torch.nan), torch.ones(6, 6)])
def test_degenerate_hessians_give_finite_factors(hessian):
    assert inverse_factor(hessian, 0.01).isfinite().all()
