"""A weight as packed indices into palettes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from trimtab.compress.packed_indices import pack, packed_size, unpack
from trimtab.compress.palettes import look_up


@dataclass(frozen=True)
class ClusteredWeight:
    """A matrix (O, I) whose entries are indices into the palette of their group of rows.

    Args:
        packed_OB: Indices, each row packed into bytes (see `packed_indices`).
        palettes_GK: A palette of 2**bits values for every group of `rows` rows; the last group can have fewer rows.
        bits: Bits of an index.
        rows: Rows of a group.
        num_columns: I.
        scales_OS: Factors of the palette's values, one for each block of `scale_block` columns of a row; the last block
            can be smaller. In int8; fp16 or fp32 in old files. None if palettes contain the weights themselves.
        scale_block: Columns of a block; 0 without scales.
        transposed: Whether the module stores the matrix as (I, O), as transformers' Conv1D does.
    """

    packed_OB: Tensor
    palettes_GK: Tensor
    bits: int
    rows: int
    num_columns: int
    scales_OS: Tensor | None = None
    scale_block: int = 0
    transposed: bool = False

    @classmethod
    def from_indices(cls, indices_OI: Tensor, palettes_GK: Tensor, rows: int, **others: Any) -> "ClusteredWeight":
        """Pack indices."""
        bits = palettes_GK.shape[1].bit_length() - 1
        return cls(pack(indices_OI, bits), palettes_GK, bits, rows, indices_OI.shape[1], **others)

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return self.packed_OB.shape[0], self.num_columns

    @property
    def num_bytes(self) -> int:
        """Size of indices, palettes and scales."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors, by the last part of their names."""
        parts = {"indices": self.packed_OB, "palettes": self.palettes_GK}
        return parts if self.scales_OS is None else parts | {"scales": self.scales_OS}

    @property
    def layout(self) -> dict[str, Any]:
        """The values needed to decode the tensors, as JSON values."""
        about = {"shape": list(self.shape), "bits": self.bits, "rows": self.rows}
        return about | {"scale_block": self.scale_block, "transposed": self.transposed}

    def indices(self) -> Tensor:
        """Return the indices as (O, I) in uint8."""
        return unpack(self.packed_OB, self.bits, self.num_columns)

    def matrix(self) -> Tensor:
        """Return the matrix (O, I) in the dtype of the palettes."""
        return self.scaled(look_up(self.indices(), self.palettes_GK, self.rows))

    def scaled(self, values_OI: Tensor) -> Tensor:
        """Multiply values of palettes, or their gradients, with their scales."""
        if self.scales_OS is None:
            return values_OI
        return values_OI * spread(self.scales_OS, self.scale_block, self.num_columns).to(values_OI.dtype)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the shape that its module stores, computed in fp32 and rounded once."""
        matrix_OI = self.with_palettes(self.palettes_GK.float()).matrix().to(dtype)
        return matrix_OI.T.contiguous() if self.transposed else matrix_OI

    def with_palettes(self, palettes_GK: Tensor) -> "ClusteredWeight":
        """Return the same indices with other palettes."""
        return replace(self, palettes_GK=palettes_GK)


def spread(scales: Tensor, block: int, num_columns: int) -> Tensor:
    """Repeat the scale of each block for its columns, in the last dimension."""
    return scales.repeat_interleave(block, -1)[..., :num_columns]


def find_layout_problem(tensors: Mapping[str, Tensor], layout: Mapping[str, Any]) -> str:
    """Return why tensors of a file cannot be decoded with a layout from its description; empty if they can."""
    try:
        (num_rows, num_columns), bits, rows = layout["shape"], layout["bits"], layout["rows"]
        block = layout["scale_block"]
        is_known = all(type(value) is int and value > 0 for value in (num_rows, num_columns, bits, rows))
        is_known = is_known and type(block) is int and block >= 0 and bits <= 8
    except (KeyError, TypeError, ValueError):
        is_known = False
    if not is_known:
        return "its layout is unknown"
    packed, palettes, scales = tensors["indices"], tensors["palettes"], tensors.get("scales")
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (num_rows, packed_size(num_columns, bits)):
        return f"its indices are {packed.dtype} {list(packed.shape)}, which is not {num_rows} rows of {bits} bits"
    wanted = [(palettes, "palettes", (-(-num_rows // rows), 2**bits))]
    if scales is not None:
        wanted.append((scales, "scales", (num_rows, -(-num_columns // max(1, block)))))
    for tensor, name, shape in wanted:
        is_number = tensor.is_floating_point() or (name == "scales" and tensor.dtype == torch.int8)
        if not is_number or tuple(tensor.shape) != shape:
            return f"its {name} are {tensor.dtype} {list(tensor.shape)}, which do not match its indices"
        if not bool(tensor.isfinite().all()):
            return f"its {name} contain NaN or infinite values"
    return ""
