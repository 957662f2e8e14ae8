"""Operations of mixture-of-experts models as CUDA runs them.

The experts are one grouped product, which transformers uses by default: a tensor holds the tokens of all experts,
sorted by expert, so no shape depends on the routing. Models that loop over experts get balanced choices: see
`known_values.py`.
"""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _grouped_mm(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None = None, *more: Any, **options: Any
) -> torch.Tensor:
    """The result of a grouped product, with rows of a multiple of 16 bytes.

    torch's CUDA kernel is for bf16; a product in another dtype is one matrix product per expert, which writes to the
    same result. Autocast affects neither. torch's function for `meta` accepts only bf16.
    """
    for tensor in (left, right):
        row_bytes = max(tensor.stride()[-2:]) * tensor.element_size()
        if row_bytes % 16:  # the kernel rejects it, also in fp32
            raise RuntimeError(f"grouped product: rows of {row_bytes} bytes, not a multiple of 16")
    is_flat = left.dim() == 2, right.dim() == 2
    if all(is_flat):
        assert offsets is not None
        shape: tuple[int, ...] = (offsets.shape[0], left.shape[0], right.shape[1])
    elif is_flat[0]:
        shape = (left.shape[0], right.shape[-1])
    elif is_flat[1]:
        shape = (left.shape[1], right.shape[1])
    else:
        shape = (left.shape[0], left.shape[1], right.shape[-1])
    alignment = 16 // left.element_size()
    width = -(-shape[-1] // alignment) * alignment
    strides = (width, 1) if len(shape) == 2 else (shape[1] * width, width, 1)
    return torch.empty_strided(shape, strides, dtype=left.dtype, device="meta")


def flops_of_grouped_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """FLOPs of a grouped product: every row is multiplied by the matrix of one expert."""
    is_of_one_side = left.dim() == 3 and right.dim() == 2  # whose columns are divided among the matrices
    num_left = left.numel() // left.shape[0] if is_of_one_side else left.numel()
    return 2 * num_left * right.shape[-1]


def sort_temporaries(args: tuple[Any, ...]) -> list[int]:
    """Temporaries of sorting many values: their indices, and a second copy of values and indices for radix sort."""
    values = args[0]
    dims = [arg for arg in args[1:] if type(arg) is int]
    length = values.shape[dims[0] if dims else -1] if values.dim() else 1
    if length <= _MOST_OF_A_SMALL_SORT:
        return []
    return [8 * values.numel(), values.numel() * (values.element_size() + 8)]


_MOST_OF_A_SMALL_SORT = 4096  # up to this number, values are sorted in shared memory

STAND_INS: dict[Any, Callable[..., Any]] = {aten._grouped_mm.default: _grouped_mm}
