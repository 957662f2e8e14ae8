"""Rounding of a weight that spreads the error of each column over the columns that are not rounded yet.

The output of a linear module is W x. Rounding the entries of W one by one ignores that inputs are correlated: an error
in one column can be made up for in another. With H = X Xᵀ (the sum over calibration inputs x of x xᵀ), the error of the
output is tr((W - Ŵ) H (W - Ŵ)ᵀ). Once column j is rounded, the change of the later columns that minimizes it is known
in closed form from the Cholesky factor U of the inverse, H⁻¹ = Uᵀ U: subtract error_j / U_jj * U_j,later (this is the
method of GPTQ). Any rounding can be used: a grid, a palette.

Shapes: O rows (outputs), I columns (inputs), C columns of a block.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_MAX_DAMPING_STEPS = 8  # each multiplies the damping by 10


def compensated(
    weight_OI: Tensor,
    hessian_II: Tensor,
    round_columns: Callable[[Tensor, int], Tensor],
    *,
    block: int = 128,
    damping: float = 0.01,
) -> Tensor:
    """Round a weight column by column, and spread each error over later columns.

    Args:
        weight_OI: The weight; it is not changed.
        hessian_II: Sum of x xᵀ over inputs x of the module; its scale does not matter.
        round_columns: Called as `round_columns(values, first_column)` for each column in order, with its current
            values, compensated for all errors so far, as (O, 1); returns the rounded values in the same shape.
        block: Columns whose errors are applied to the rest of the weight in one product.
        damping: Added to the diagonal of the Hessian, as a fraction of its mean.

    Returns:
        The rounded weight, in fp32.
    """
    current_OI = weight_OI.detach().float().clone()
    hessian_II = hessian_II.to(current_OI.device)
    # An input that is always 0 has no influence; its column is rounded without compensation and receives no errors of
    # others.
    unused_I = hessian_II.diagonal() <= 0
    factor_II = inverse_factor(hessian_II, damping).to(current_OI.dtype)
    factor_II[:, unused_I] = factor_II[:, unused_I] * torch.eye(len(factor_II), device=factor_II.device)[:, unused_I]
    rounded_OI = torch.empty_like(current_OI)
    num_columns = current_OI.shape[1]
    for start in range(0, num_columns, block):
        end = min(start + block, num_columns)
        values_OC, factor_CC = current_OI[:, start:end], factor_II[start:end, start:end]
        errors_OC = torch.empty_like(values_OC)
        for index in range(end - start):
            column_O1 = values_OC[:, index : index + 1]
            new_O1 = round_columns(column_O1.clone(), start + index).to(current_OI.dtype)
            rounded_OI[:, start + index] = new_O1[:, 0]
            error_O1 = (column_O1 - new_O1) / factor_CC[index, index]
            values_OC[:, index:] -= error_O1 * factor_CC[index, index:]
            errors_OC[:, index] = error_O1[:, 0]
        current_OI[:, end:] -= errors_OC @ factor_II[start:end, end:]
    return rounded_OI


def output_error(weight_OI: Tensor, rounded_OI: Tensor, hessian_II: Tensor) -> float:
    """Return the squared error of the outputs, summed over the inputs of the Hessian."""
    change_OI = (weight_OI - rounded_OI).to(hessian_II.dtype)
    return ((change_OI @ hessian_II) * change_OI).sum().item()


def inverse_factor(hessian_II: Tensor, damping: float) -> Tensor:
    """Return the upper Cholesky factor of the inverse of a damped Hessian, in fp64.

    Damping is increased until the factorization succeeds: few calibration rows give a singular Hessian.
    """
    hessian_II = hessian_II.double()
    hessian_II = (hessian_II + hessian_II.T) / 2
    mean = hessian_II.diagonal().clamp(min=0).mean().clamp(min=torch.finfo(torch.float32).tiny)
    identity_II = torch.eye(len(hessian_II), dtype=hessian_II.dtype, device=hessian_II.device)
    for step in range(_MAX_DAMPING_STEPS):
        factor_II, failed = torch.linalg.cholesky_ex(hessian_II + identity_II * (mean * damping * 10**step))
        if not failed and factor_II.isfinite().all():
            inverse_II = torch.cholesky_inverse(factor_II)
            upper_II: Tensor
            upper_II, failed = torch.linalg.cholesky_ex(inverse_II, upper=True)
            if not failed:
                return upper_II
    # Not positive definite at any damping, or not finite: no compensation is better than a wrong one.
    return identity_II
