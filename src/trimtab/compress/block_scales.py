"""Scales of blocks of columns: signed factors of 8 bits, which multiply the palette of their group of rows.

A weight divided by its scales is more even than the weight, so one palette represents it better. The unit of the codes
is part of the palettes: the entry of the largest magnitude of a group of rows has the code 127 or -127. Initially a
code has the sign of the largest entry of its block, so that every block has an entry near the largest value of the
palette; then a search finds the codes with the least error, because the largest entry is only one of many.

Shapes: O rows and I columns of a weight, S blocks of a row, G groups of rows, K values of a palette.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.compress.clustered_weight import spread
from trimtab.compress.palettes import look_up, nearest

_LARGEST = 127
_LEAST = 3.5  # largest code of a row; below it, 8-bit codes are too coarse
_FACTORS = (1.0, 0.8, 0.87, 0.94, 1.07)  # neighbours of a code, tried with both signs
_MAX_VALUES = 2**20  # number of entries searched at a time


@dataclass(frozen=True)
class BlockScales:
    """Scales of a weight; without codes, it does nothing.

    Args:
        block: Columns of a block; the last block of a row can be smaller.
        num_columns: I.
        codes_OS: The scales in int8, or in fp16 if a row is far smaller than the largest of its group; 0 only for
            blocks of zeros. None for no scales.
    """

    block: int
    num_columns: int
    codes_OS: Tensor | None = None

    @classmethod
    def of(cls, weight_OI: Tensor, block: int, rows: int) -> "BlockScales":
        """Return scales from the largest entry of each block.

        Args:
            weight_OI: The weight.
            block: Columns of a block; 0 for no scales.
            rows: Rows of a group, which shares a palette.
        """
        if not block:
            return cls(0, weight_OI.shape[1])
        blocks = _blocks(weight_OI, block)
        largest_OS = blocks.gather(2, blocks.abs().argmax(2, keepdim=True)).squeeze(2)
        num_rows = len(weight_OI)
        grouped = functional.pad(largest_OS, (0, 0, 0, -num_rows % rows)).reshape(-(-num_rows // rows), -1)
        units_G = (grouped.abs().amax(1) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
        codes_OS = largest_OS / units_G.repeat_interleave(rows)[:num_rows, None]
        largest_O = codes_OS.abs().amax(1)
        is_coarse = bool((largest_O[largest_O > 0] < _LEAST).any())
        dtype = torch.float16 if is_coarse else torch.int8
        return cls(block, weight_OI.shape[1], _rounded(codes_OS, largest_OS, dtype))

    def factors(self, columns: slice = slice(None)) -> Tensor | float:
        """Return the scale of every entry of columns, in fp32."""
        return 1.0 if self.codes_OS is None else self._spread(columns)

    def divided(self, values_OC: Tensor, columns: slice = slice(None)) -> Tensor:
        """Return values of columns as multiples of their scales, from which palettes are computed."""
        return values_OC if self.codes_OS is None else _divided(values_OC, self._spread(columns))

    def importance(self, importance: Tensor | None) -> Tensor | None:
        """Return the importance of errors of the divided weight."""
        if self.codes_OS is None:
            return importance
        return self._spread().square() * (1.0 if importance is None else importance)

    def searched(
        self, weight_OI: Tensor, palettes_GK: Tensor, rows: int, importance: Tensor | None = None
    ) -> "BlockScales":
        """Return scales with which palettes represent a weight better.

        Args:
            weight_OI: The weight.
            palettes_GK: Palettes of the weight divided by the current scales, sorted.
            rows: Rows of a group.
            importance: Weights of squared errors; broadcast to the shape of the weight.
        """
        if self.codes_OS is None:
            return self
        weights = torch.ones_like(weight_OI[:1]) if importance is None else importance.to(weight_OI)
        weights = weights.expand_as(weight_OI)
        codes_OS = self.codes_OS.clone()
        for part, palettes, rows_of_part in _parts(weight_OI, palettes_GK, rows):
            codes = self.codes_OS[part].float()
            searched = _Searched(weight_OI[part], codes, self.block, codes_OS.dtype)
            codes_OS[part] = searched.best(palettes, rows_of_part, weights[part]).to(codes_OS.dtype)
        return replace(self, codes_OS=codes_OS)

    def _spread(self, columns: slice = slice(None)) -> Tensor:
        assert self.codes_OS is not None
        if columns == slice(None):
            return spread(self.codes_OS.float(), self.block, self.num_columns)
        at = torch.arange(self.num_columns, device=self.codes_OS.device)[columns] // self.block
        return self.codes_OS[:, at].float()


def _blocks(values_OI: Tensor, block: int) -> Tensor:
    """Return the blocks of each row as (O, S, block); the last one is filled up with zeros."""
    return functional.pad(values_OI, (0, -values_OI.shape[1] % block)).view(len(values_OI), -1, block)


def _rounded(codes_OS: Tensor, signs_OS: Tensor, dtype: torch.dtype) -> Tensor:
    """Round codes; only blocks of zeros, which have no sign, get 0."""
    if dtype is not torch.int8:
        return codes_OS.to(dtype)
    rounded_OS = codes_OS.round().clamp(-_LARGEST, _LARGEST)
    return torch.where(rounded_OS == 0, signs_OS.sign(), rounded_OS).to(dtype)


def _divided(values: Tensor, factors: Tensor) -> Tensor:
    return values / torch.where(factors == 0, torch.ones_like(factors), factors)


@dataclass(frozen=True)
class _Searched:
    """Rows of a weight whose codes are searched.

    Args:
        weight_OI: The rows.
        codes_OS: Their codes, in fp32.
        block: Columns of a block.
        dtype: The dtype to which codes are rounded.
    """

    weight_OI: Tensor
    codes_OS: Tensor
    block: int
    dtype: torch.dtype

    def best(self, palettes_GK: Tensor, rows: int, importance_OI: Tensor) -> Tensor:
        """Return the codes near the current ones, or near their negatives, with the least error."""
        best_OS, least_OS = self.codes_OS, torch.full_like(self.codes_OS, torch.inf)
        for factor in (sign * factor for sign in (1, -1) for factor in _FACTORS):
            tried_OS = _rounded(self.codes_OS * factor, self.codes_OS * factor, self.dtype).float()
            factors_OI = spread(tried_OS, self.block, self.weight_OI.shape[1])
            indices_OI = nearest(_divided(self.weight_OI, factors_OI), palettes_GK, rows)
            change_OI = self.weight_OI - look_up(indices_OI, palettes_GK, rows) * factors_OI
            error_OS = _blocks(change_OI.square_().mul_(importance_OI), self.block).sum(2)
            best_OS = torch.where(error_OS < least_OS, tried_OS, best_OS)
            least_OS = torch.minimum(least_OS, error_OS)
        return best_OS


def _parts(weight_OI: Tensor, palettes_GK: Tensor, rows: int) -> Iterator[tuple[slice, Tensor, int]]:
    """Yield rows to search together, their palettes, and how many of these rows share a palette."""
    num_rows, num_columns = weight_OI.shape
    at_a_time = max(1, _MAX_VALUES // num_columns)
    if at_a_time >= rows:  # whole groups
        step = at_a_time // rows
        for start in range(0, len(palettes_GK), step):
            yield slice(start * rows, (start + step) * rows), palettes_GK[start : start + step], rows
        return
    for group in range(len(palettes_GK)):
        end = min((group + 1) * rows, num_rows)
        for first in range(group * rows, end, at_a_time):
            yield slice(first, min(first + at_a_time, end)), palettes_GK[group : group + 1], at_a_time
