"""A weight as packed indices into palettes."""

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
        transposed: Whether the module stores the matrix as (I, O), as transformers' Conv1D does.
    """

    packed_OB: Tensor
    palettes_GK: Tensor
    bits: int
    rows: int
    num_columns: int
    transposed: bool = False

    @classmethod
    def from_indices(
        cls, indices_OI: Tensor, palettes_GK: Tensor, bits: int, rows: int, *, transposed: bool = False
    ) -> "ClusteredWeight":
        """Pack indices."""
        return cls(pack(indices_OI, bits), palettes_GK, bits, rows, indices_OI.shape[1], transposed)

    @property
    def shape(self) -> tuple[int, int]:
        """O and I."""
        return self.packed_OB.shape[0], self.num_columns

    @property
    def num_bytes(self) -> int:
        """Size of indices and palettes."""
        return self.packed_OB.nbytes + self.palettes_GK.nbytes

    @property
    def layout(self) -> dict[str, Any]:
        """What is needed to decode the two tensors, as JSON values."""
        return {"shape": list(self.shape), "bits": self.bits, "rows": self.rows, "transposed": self.transposed}

    def indices(self) -> Tensor:
        """Return the indices as (O, I) in uint8."""
        return unpack(self.packed_OB, self.bits, self.num_columns)

    def matrix(self) -> Tensor:
        """Return the matrix (O, I) in the dtype of the palettes."""
        return look_up(self.indices(), self.palettes_GK, self.rows)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in the shape that its module stores."""
        matrix_OI = self.matrix().to(dtype)
        return matrix_OI.T.contiguous() if self.transposed else matrix_OI

    def with_palettes(self, palettes_GK: Tensor) -> "ClusteredWeight":
        """Return the same indices with other palettes."""
        return replace(self, palettes_GK=palettes_GK)


def find_layout_problem(packed: Tensor, palettes: Tensor, layout: dict[str, Any]) -> str:
    """Return why two tensors of a file cannot be decoded with a layout from its description; empty if they can."""
    try:
        (num_rows, num_columns), bits, rows = layout["shape"], layout["bits"], layout["rows"]
        is_known = all(type(value) is int and value > 0 for value in (num_rows, num_columns, bits, rows))
    except (KeyError, TypeError, ValueError):
        is_known = False
    if not is_known or bits > 8:
        return "its layout is not known"
    if packed.dtype != torch.uint8 or tuple(packed.shape) != (num_rows, packed_size(num_columns, bits)):
        return f"its indices are {packed.dtype} {list(packed.shape)}, which is not {num_rows} rows of {bits} bits"
    if not palettes.is_floating_point() or tuple(palettes.shape) != (-(-num_rows // rows), 2**bits):
        return f"its palettes are {palettes.dtype} {list(palettes.shape)}, which do not belong to its indices"
    return "" if bool(palettes.isfinite().all()) else "its palettes contain NaN or infinite values"
