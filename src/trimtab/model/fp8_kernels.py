"""Triton kernels that round matrices to fp8 and transpose them. Imported only if Triton is installed.

torch's operations would write fp32 copies of a matrix to round it, and transpose single bytes without coalescing.
"""

import importlib
from typing import Any

import torch

from trimtab.model.fp8 import FP8, limits

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

WIDEST = 2**16  # a Triton program holds a row in registers
_TILE = 64


# fmt: off
def _quantize(  # type: ignore[no-untyped-def]
    x, factors, codes, scales, width, largest_code, smallest,
    HAS_FACTORS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    values = tl.load(x + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_FACTORS:
        values = values * tl.load(factors + at, mask=inside, other=0.0)
    largest = tl.maximum(tl.max(tl.abs(values), axis=0), smallest)
    tl.store(scales + row, largest / largest_code)
    tl.store(codes + row * width + at, (values * (largest_code / largest)).to(tl.float8e4nv), mask=inside)


def _transpose(  # type: ignore[no-untyped-def]
    source, target, num_rows, num_columns, TILE: tl.constexpr  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
    is_there = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tile = tl.load(source + row[:, None] * num_columns + column[None, :], mask=is_there, other=0)
    is_there = (column < num_columns)[:, None] & (row < num_rows)[None, :]
    tl.store(target + column[:, None] * num_rows + row[None, :], tl.trans(tile), mask=is_there)


_quantize_kernel = triton.jit(_quantize)
_transpose_kernel = triton.jit(_transpose)


def quantize_rows(x: torch.Tensor, factors: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.model.fp8.quantized_rows`; `x` is contiguous and has at most `WIDEST` columns."""
    num_rows, width = x.shape
    # made from `x`, so that selective recomputation sees that they depend on activations
    codes = torch.empty_like(x, dtype=torch.uint8).view(FP8)
    scales = x.new_empty((num_rows, 1), dtype=torch.float32)
    block = triton.next_power_of_2(width)
    with torch.cuda.device(x.device):
        _quantize_kernel[(num_rows,)](
            x,
            x if factors is None else factors,
            codes,
            scales,
            width,
            *limits(),
            HAS_FACTORS=factors is not None,
            BLOCK=block,
            num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16,
        )
    return codes, scales


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """See `trimtab.model.fp8.transposed`; `codes` is contiguous."""
    num_rows, num_columns = codes.shape
    target = torch.empty((num_columns, num_rows), dtype=torch.uint8, device=codes.device)
    with torch.cuda.device(codes.device):
        grid = (triton.cdiv(num_rows, _TILE), triton.cdiv(num_columns, _TILE))
        _transpose_kernel[grid](codes.view(torch.uint8), target, num_rows, num_columns, TILE=_TILE)
    return target.view(FP8)
