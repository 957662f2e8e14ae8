"""A Triton kernel that multiplies rows with a clustered weight. Imported only if Triton is installed.

A program computes one row of the batch times `BLOCK_ROWS` rows of the weight. It reads `BLOCK_BYTES` bytes of each row
of indices at a time; palettes are small enough for the L1 cache. Sums are fp32. Only numbers of bits that divide 8 are
supported, so that no index spans two bytes. Shapes: M rows of the batch, O and I of the weight, B bytes of a packed
row.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.clustered_weight import ClusteredWeight

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

BLOCK_ROWS = 16
BLOCK_BYTES = 128


# fmt: off
def _multiply(  # type: ignore[no-untyped-def]
    x, packed, palettes, scales, y, num_rows, num_columns, num_bytes, rows_per_group, num_scales,
    BITS: tl.constexpr, SCALE_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr, BLOCK_BYTES: tl.constexpr,  # noqa: N803
):
    # fmt: on
    per_byte: tl.constexpr = 8 // BITS
    num_values: tl.constexpr = 1 << BITS
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = row < num_rows
    x += tl.program_id(1).to(tl.int64) * num_columns
    y += tl.program_id(1).to(tl.int64) * num_rows
    indices = packed + row.to(tl.int64)[:, None] * num_bytes
    palette = palettes + (row // rows_per_group).to(tl.int64)[:, None] * num_values
    total = tl.zeros((BLOCK_ROWS,), dtype=tl.float32)
    for start in range(0, num_bytes, BLOCK_BYTES):
        at = start + tl.arange(0, BLOCK_BYTES)
        mask = is_row[:, None] & (at < num_bytes)[None, :]
        codes = tl.load(indices + at[None, :], mask=mask, other=0).to(tl.int32)
        for part in tl.static_range(per_byte):
            column = at * per_byte + part
            index = (codes >> (part * BITS)) & (num_values - 1)
            value = tl.load(palette + index, mask=mask, other=0.0).to(tl.float32)
            factor = tl.load(x + column, mask=column < num_columns, other=0.0).to(tl.float32)
            if SCALE_BLOCK:
                place = row.to(tl.int64)[:, None] * num_scales + (column // SCALE_BLOCK)[None, :]
                is_scaled = mask & (column < num_columns)[None, :]
                value *= tl.load(scales + place, mask=is_scaled, other=0).to(tl.float32)
            total += tl.sum(value * factor[None, :], axis=1)
    tl.store(y + row, total.to(y.dtype.element_ty), mask=is_row)


_kernel = triton.jit(_multiply)


def multiply(x: Tensor, weight: ClusteredWeight) -> Tensor:
    """Return x Wᵀ in the dtype of x, for x of any shape (…, I)."""
    num_rows, num_columns = weight.shape
    x_MI = x.reshape(-1, num_columns).contiguous()
    y_MO = torch.empty(len(x_MI), num_rows, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(num_rows, BLOCK_ROWS), len(x_MI))
    scales = weight.palettes_GK if weight.scales_OS is None else weight.scales_OS  # not read without scales
    sizes = num_rows, num_columns, weight.packed_OB.shape[1], weight.rows, scales.shape[1]
    _kernel[grid](
        x_MI, weight.packed_OB, weight.palettes_GK, scales, y_MO, *sizes,
        BITS=weight.bits, SCALE_BLOCK=weight.scale_block, BLOCK_ROWS=BLOCK_ROWS, BLOCK_BYTES=BLOCK_BYTES,
    )  # fmt: skip
    return y_MO.view(*x.shape[:-1], num_rows)
