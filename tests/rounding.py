"""Tolerances that follow from the dtype and the size of the values.

Processors sum in different orders and fuse different operations, so two ways to compute the same number agree only up
to some roundings. An absolute tolerance such as 1e-8 is less than one rounding of a weight near 1.
"""

import torch


def rounding_error(values, num_roundings: float, dtype: torch.dtype | None = None) -> float:
    """The error that so many roundings make at the size of the largest value.

    Args:
        values: A tensor, or numbers, which count as fp32.
        num_roundings: The number of roundings, each by `finfo(dtype).eps` of the largest value.
        dtype: The dtype that was computed in, where it is not that of the tensor.
    """
    values = torch.as_tensor(values).detach()
    dtype = dtype or (values.dtype if values.is_floating_point() else torch.float32)
    return num_roundings * torch.finfo(dtype).eps * float(values.abs().max())


def assert_same_up_to_rounding(found, expected, num_roundings: float, size=None) -> None:
    """Assert that no element differs by more than `rounding_error`.

    Args:
        found: A tensor; its dtype is the one that was computed in.
        expected: A tensor of the same shape, possibly of another dtype.
        num_roundings: See `rounding_error`.
        size: A value whose size counts in place of `expected`, for results of larger numbers that cancel.
    """
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    assert found.shape == expected.shape
    allowed = rounding_error(expected if size is None else size, num_roundings, found.dtype)
    difference = float((found.double() - expected.double()).abs().max())
    assert difference <= allowed, (
        f"off by {difference:.3g}; {num_roundings} roundings of {found.dtype} are {allowed:.3g}"
    )


def assert_as_exact(found, plain, exact, factor: float = 4) -> None:
    """Assert that the largest error is at most `factor` times that of the plain computation, or a rounding per factor.

    Args:
        found: A tensor.
        plain: The same, computed in the same dtype without the mechanism that is tested.
        exact: The same in fp64.
        factor: How much larger the error may be; the largest of two sets of errors of one kind differ by less than 4.
    """
    error, of_plain = (float((tensor.detach().double() - exact).abs().max()) for tensor in (found, plain))
    allowed = factor * max(of_plain, rounding_error(exact, 1, plain.dtype))
    assert error <= allowed, f"off by {error:.3g}; the plain computation is off by {of_plain:.3g}"
