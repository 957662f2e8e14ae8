"""Palettes: the values to which the weights of a group are clustered, found by weighted k-means in one dimension.

Lloyd's algorithm on sorted values: clusters are intervals, so one iteration is a binary search of the K - 1 boundaries
and differences of prefix sums, for all groups together. It is started from three palettes, and the best result of each
group is kept: quantiles, an even grid (the result is then never worse than rounding to that grid) and quantiles of the
cube root of the density, which is optimal for many values. Nothing is random.

Shapes: G groups, N values of a group, K values of a palette, O rows and I columns of a weight, R rows of a group.
"""

import torch
from torch import Tensor

_MAX_ITERATIONS = 60
_MIN_GAIN = 1e-4  # smallest relative decrease of the error for which another iteration is run
_NUM_BINS = 512  # bins of the histogram that estimates a density
_STARTS = ("quantiles", "grid", "density")
_MAX_VALUES = 2**22  # values sorted at a time, in fp64 with their prefix sums


def rows_of_group(
    shape: tuple[int, int], bits: int, per: str, rows: int | None = None, weights_per_bit: int = 4
) -> int:
    """Return how many consecutive rows of a weight share a palette.

    Args:
        shape: O and I.
        bits: A palette has 2**bits values.
        per: "tensor", "rows" or "channel".
        rows: Rows of a group, for "rows". The last group of a weight can be smaller. None chooses the smallest groups
            with `weights_per_bit` weights for each bit of a palette in fp16.
        weights_per_bit: 4 adds a quarter of a bit to each weight.
    """
    num_rows, num_columns = shape
    wanted = rows or -(-16 * 2**bits * weights_per_bit // num_columns)
    return {"tensor": num_rows, "rows": min(wanted, num_rows), "channel": 1}[per]


def find_palettes(
    weight_OI: Tensor, bits: int, rows: int, importance: Tensor | None = None, start_GK: Tensor | None = None
) -> Tensor:
    """Return a palette for every group of rows, sorted, in fp32.

    Args:
        weight_OI: The weight.
        bits: A palette has 2**bits values.
        rows: Rows of a group.
        importance: Weight of the squared error of each entry, not negative; broadcast to the shape of the weight.
        start_GK: Sorted palettes to improve; the result is never worse. None starts from scratch.

    Returns:
        Palettes as (G, K).
    """
    num_rows = weight_OI.shape[0]
    weight_OI = weight_OI.float()
    if importance is not None:
        importance = importance.to(weight_OI).expand_as(weight_OI)
    num_whole = num_rows // rows
    palettes = []
    per_call = max(1, _MAX_VALUES // (rows * weight_OI.shape[1]))
    edges = [*range(0, num_whole, per_call), num_whole]
    for start, end in zip(edges, edges[1:], strict=False):
        of = slice(start * rows, end * rows)
        weights = None if importance is None else importance[of].reshape(end - start, -1)
        first = None if start_GK is None else start_GK[start:end]
        palettes.append(cluster(weight_OI[of].reshape(end - start, -1), 2**bits, weights, first))
    if num_rows % rows:  # a shorter last group
        rest = None if importance is None else importance[num_whole * rows :].reshape(1, -1)
        first = None if start_GK is None else start_GK[num_whole:]
        palettes.append(cluster(weight_OI[num_whole * rows :].reshape(1, -1), 2**bits, rest, first))
    return torch.cat(palettes)


def cluster(
    values_GN: Tensor, num_values: int, weights_GN: Tensor | None = None, start_GK: Tensor | None = None
) -> Tensor:
    """Return the best palette found for each group, sorted, as (G, K) in fp32.

    Args:
        values_GN: The values of each group.
        num_values: K.
        weights_GN: Weight of each value's squared error; None for equal weights. A group whose weights are all 0 is
            clustered with equal weights.
        start_GK: The only palettes to start from, sorted; None for all starts.
    """
    sorted_GN, order_GN = values_GN.sort(1)
    sorted_GN = sorted_GN.double()
    if weights_GN is None:
        weights_GN = torch.ones_like(sorted_GN)
    else:
        weights_GN = weights_GN.gather(1, order_GN).double()
        weights_GN = torch.where(weights_GN.sum(1, keepdim=True) > 0, weights_GN, torch.ones_like(weights_GN))
    sums = _PrefixSums(sorted_GN, weights_GN)
    if start_GK is not None:
        return _lloyd(sorted_GN, sums, start_GK.double())[0].float()
    best_GK, best_G = None, None
    for start in _STARTS:
        palette_GK, error_G = _lloyd(sorted_GN, sums, _start(start, sorted_GN, weights_GN, num_values))
        if best_GK is None or best_G is None:
            best_GK, best_G = palette_GK, error_G
        else:
            better_G = error_G < best_G
            best_GK = torch.where(better_G[:, None], palette_GK, best_GK)
            best_G = torch.where(better_G, error_G, best_G)
    assert best_GK is not None
    return best_GK.float()


def nearest(values_OI: Tensor, palettes_GK: Tensor, rows: int) -> Tensor:
    """Return the index of the palette value nearest to each entry of a weight, as uint8 of the weight's shape."""
    num_rows, num_columns = values_OI.shape
    num_groups, num_values = palettes_GK.shape
    padded_OI = torch.nn.functional.pad(values_OI.float(), (0, 0, 0, num_groups * rows - num_rows))
    bounds_GK = (palettes_GK[:, 1:].float() + palettes_GK[:, :-1].float()) / 2
    found = torch.searchsorted(bounds_GK.contiguous(), padded_OI.reshape(num_groups, rows * num_columns).contiguous())
    return found.to(torch.uint8).reshape(-1, num_columns)[:num_rows]


def look_up(indices_OI: Tensor, palettes_GK: Tensor, rows: int) -> Tensor:
    """Return the weight that indices and palettes represent, in the dtype of the palettes."""
    num_rows = indices_OI.shape[0]
    offsets_O1 = torch.arange(num_rows, device=indices_OI.device).div(rows, rounding_mode="floor")[:, None]
    flat = indices_OI.to(torch.int32) + (offsets_O1 * palettes_GK.shape[1]).to(torch.int32)
    return palettes_GK.reshape(-1).index_select(0, flat.reshape(-1)).view(indices_OI.shape)


class _PrefixSums:
    """Prefix sums of w, w x and w x² of sorted values, with a leading 0."""

    def __init__(self, sorted_GN: Tensor, weights_GN: Tensor) -> None:
        pad = (1, 0)
        products = (weights_GN, weights_GN * sorted_GN, weights_GN * sorted_GN.square())
        self.parts = [torch.nn.functional.pad(part.cumsum(1), pad) for part in products]

    def between(self, edges_GE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three sums of the values between neighbouring edges, as (G, E - 1) each."""
        weight, first, second = (part.gather(1, edges_GE).diff(dim=1) for part in self.parts)
        return weight, first, second


def _lloyd(sorted_GN: Tensor, sums: _PrefixSums, palette_GK: Tensor) -> tuple[Tensor, Tensor]:
    """Iterate from a sorted palette; returns the palette and the weighted squared error of each group."""
    num_groups, num_values = sorted_GN.shape
    first_G1 = torch.zeros(num_groups, 1, dtype=torch.int64, device=sorted_GN.device)
    last_G1 = first_G1 + num_values
    error_G = torch.full((num_groups,), torch.inf, dtype=sorted_GN.dtype, device=sorted_GN.device)
    for _ in range(_MAX_ITERATIONS):
        bounds = (palette_GK[:, 1:] + palette_GK[:, :-1]) / 2
        edges = torch.cat([first_G1, torch.searchsorted(sorted_GN, bounds), last_G1], 1)
        weight_GK, sum_GK, square_GK = sums.between(edges)
        has_values = weight_GK > 0
        palette_GK = torch.where(has_values, sum_GK / weight_GK.clamp(min=1e-300), palette_GK)
        palette_GK = palette_GK.sort(1).values  # an empty cluster keeps its value, which rounding may misplace
        spread_GK = square_GK - torch.where(has_values, sum_GK.square() / weight_GK.clamp(min=1e-300), 0)
        new_G = spread_GK.clamp(min=0).sum(1)
        gain_G = error_G - new_G
        error_G = new_G
        if bool((gain_G <= _MIN_GAIN * new_G).all()):
            break
    return palette_GK, error_G


def _start(kind: str, sorted_GN: Tensor, weights_GN: Tensor, num_values: int) -> Tensor:
    low_G1, high_G1 = sorted_GN[:, :1], sorted_GN[:, -1:]
    if kind == "grid":
        steps_K = torch.linspace(0, 1, num_values, dtype=sorted_GN.dtype, device=sorted_GN.device)
        return low_G1 + (high_G1 - low_G1) * steps_K
    if sorted_GN.shape[1] <= num_values:  # all of them
        at_K = torch.linspace(0, sorted_GN.shape[1] - 1, num_values, device=sorted_GN.device).round().long()
        return sorted_GN[:, at_K].contiguous()
    if kind == "quantiles":
        mass_GN = weights_GN.cumsum(1)
        wanted_K = (torch.arange(num_values, dtype=mass_GN.dtype, device=mass_GN.device) + 0.5) / num_values
        at_GK = torch.searchsorted(mass_GN, (mass_GN[:, -1:] * wanted_K).contiguous())
        return sorted_GN.gather(1, at_GK.clamp(max=sorted_GN.shape[1] - 1))
    return _density_start(sorted_GN, weights_GN, num_values)


def _density_start(sorted_GN: Tensor, weights_GN: Tensor, num_values: int) -> Tensor:
    """Return quantiles of the cube root of the weighted density, estimated with a histogram."""
    low_G1, high_G1 = sorted_GN[:, :1], sorted_GN[:, -1:]
    width_G1 = (high_G1 - low_G1).clamp(min=1e-300)
    bins_GN = ((sorted_GN - low_G1) / width_G1 * _NUM_BINS).long().clamp(0, _NUM_BINS - 1)
    histogram_GB = torch.zeros(len(sorted_GN), _NUM_BINS, dtype=sorted_GN.dtype, device=sorted_GN.device)
    histogram_GB.scatter_add_(1, bins_GN, weights_GN)
    mass_GB = histogram_GB.pow(1 / 3).cumsum(1)
    mass_GB = mass_GB / mass_GB[:, -1:]
    wanted_K = (torch.arange(num_values, dtype=sorted_GN.dtype, device=sorted_GN.device) + 0.5) / num_values
    found_GK = torch.searchsorted(mass_GB, wanted_K.expand(len(mass_GB), -1).contiguous())
    return low_G1 + (found_GK + 0.5) / _NUM_BINS * width_G1
