"""Cluster weights: select them, and find palettes and indices, with or without calibration.

Shapes: O rows and I columns of a weight, G groups of rows, K values of a palette.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.compress.block_scales import BlockScales
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.error_compensation import compensated, output_error
from trimtab.compress.palettes import find_palettes, look_up, nearest, rows_of_group
from trimtab.errors import RecipeError
from trimtab.model.quantization import quantizable

PER = ("tensor", "rows", "channel")
IMPORTANCE = ("none", "activations", "gradients")
_MIN_ENTRIES = 2048  # smaller weights are not clustered, because that would save little
_MAX_SCALE_BLOCK = 8192  # rows are padded to whole blocks
_NUM_REFITS = 2
_NUM_SEARCHES = 2  # of scales
# Without scales, small groups matter: palettes may add a quarter of a bit to a weight. With scales, which adapt to much
# smaller blocks, they add a 512th.
_WEIGHTS_PER_BIT = {False: 4, True: 512}
# Largest value of a palette in fp16. The spacing of its small values is then at most a 2048th of the largest one, a
# sixteenth of the mean distance of 256 values.
_SMALLEST_FP16 = 2**-13
_RIDGE = 1e-3  # pulls palette values that few entries use towards their previous positions


@dataclass(frozen=True)
class ClusterSettings:
    """How weights are clustered.

    Args:
        bits: Bits of an index, 1 to 8.
        per: The weights that share a palette: a "tensor", a group of "rows", or a "channel" (one row).
        rows: Rows of a group, for per="rows"; None chooses by size, so that palettes add at most a 512th of a bit to a
            weight, or a quarter of a bit without scales.
        scale_block: Columns of a row that share a scale of 8 bits (see `block_scales`); 0 for none.
        importance: Weights of squared errors: "none", "activations" (mean square of the input that an entry is
            multiplied with) or "gradients" (mean squared gradient of the entry).
        compensate: Whether to spread the error of each column over later columns.
        embeddings: Whether to cluster embeddings and the output layer, too.
        palette_dtype: dtype of stored palettes: fp16 if its range is sufficient, or fp32.
        rest_dtype: dtype of stored weights that are not clustered; None keeps theirs.
    """

    bits: int = 4
    per: str = "rows"
    rows: int | None = None
    scale_block: int = 64
    importance: str = "none"
    compensate: bool = False
    embeddings: bool = True
    palette_dtype: torch.dtype = torch.float16
    rest_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if not 1 <= self.bits <= 8:
            raise RecipeError(f"--bits {self.bits} is not valid", "use 1 to 8")
        if self.per not in PER:
            raise RecipeError(f"--per {self.per} is not valid", f"use one of {', '.join(PER)}")
        if self.importance not in IMPORTANCE:
            raise RecipeError(f"--importance {self.importance} is not valid", f"use one of {', '.join(IMPORTANCE)}")
        if self.rows is not None and self.per != "rows":
            what = f"--group-rows {self.rows} has no effect with --per {self.per}"
            raise RecipeError(what, "--per rows, or remove --group-rows")
        if self.rows is not None and self.rows < 1:
            raise RecipeError(f"--group-rows {self.rows} is not valid", "--group-rows 1 or more")
        if not 0 <= self.scale_block <= _MAX_SCALE_BLOCK:
            what = f"--scale-block {self.scale_block} is not valid"
            raise RecipeError(what, f"--scale-block 64, up to {_MAX_SCALE_BLOCK}, or 0 for none")

    @property
    def needs_calibration(self) -> bool:
        """Whether rows of data are needed."""
        return self.compensate or self.importance != "none"


def clusterable(model: Any, settings: ClusterSettings) -> dict[str, str]:
    """Return the weights to cluster: the parameter's (first) name and a module that holds it.

    These are the linear modules of the base model, and embeddings and the output layer if the settings include them;
    not task heads.
    """
    from transformers.pytorch_utils import Conv1D

    paths = quantizable(model)
    if settings.embeddings:
        output = model.get_output_embeddings()
        paths += [name for name, module in model.named_modules() if type(module) is nn.Embedding or module is output]
    wanted = {id(module.weight): path for path in paths if isinstance(module := model.get_submodule(path), nn.Module)}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(module) not in (nn.Linear, nn.Embedding, Conv1D) and id(weight) in wanted:
            del wanted[id(weight)]  # shared with a module that could not decode it on use
    return {
        name: wanted[id(parameter)]
        for name, parameter in model.named_parameters()
        if id(parameter) in wanted and parameter.numel() >= _MIN_ENTRIES
    }


def is_transposed(module: nn.Module) -> bool:
    """Whether a module stores its weight as (in, out)."""
    return not isinstance(module, nn.Linear | nn.Embedding)


@torch.no_grad()
def cluster_weight(
    weight_OI: Tensor,
    settings: ClusterSettings,
    *,
    hessian_II: Tensor | None = None,
    gradients_OI: Tensor | None = None,
    transposed: bool = False,
) -> ClusteredWeight:
    """Cluster a matrix.

    Args:
        weight_OI: The matrix, as (out, in).
        settings: The cluster settings.
        hessian_II: Mean of x xᵀ over inputs of the module; needed for "activations" and to compensate.
        gradients_OI: Mean squared gradients; needed for "gradients".
        transposed: Whether the module stores the transpose.
    """
    weight_OI = weight_OI.float()
    sharing = _WEIGHTS_PER_BIT[bool(settings.scale_block)]
    rows = rows_of_group((len(weight_OI), weight_OI.shape[1]), settings.bits, settings.per, settings.rows, sharing)
    importance = gradients_OI if settings.importance == "gradients" else None
    if settings.importance == "activations" and hessian_II is not None:
        importance = hessian_II.diagonal()
    scales, palettes_GK = _fit_scales(weight_OI, settings, rows, importance)
    palettes_GK = storable(palettes_GK, settings.palette_dtype)
    indices_OI = nearest(scales.divided(weight_OI), palettes_GK, rows)
    if settings.compensate and hessian_II is not None:
        palettes_GK, indices_OI = _compensate(weight_OI, palettes_GK, indices_OI, hessian_II, rows, scales)
    others = {"scales_OS": scales.codes_OS, "scale_block": settings.scale_block, "transposed": transposed}
    return ClusteredWeight.from_indices(indices_OI, palettes_GK, rows, **others)


def _fit_scales(
    weight_OI: Tensor, settings: ClusterSettings, rows: int, importance: Tensor | None
) -> tuple[BlockScales, Tensor]:
    """Find scales and palettes alternately; each round lowers the error."""
    scales = BlockScales.of(weight_OI, settings.scale_block, rows)
    palettes_GK = find_palettes(scales.divided(weight_OI), settings.bits, rows, scales.importance(importance))
    for _ in range(_NUM_SEARCHES if settings.scale_block else 0):
        scales = scales.searched(weight_OI, palettes_GK, rows, importance)
        weights = scales.importance(importance)
        palettes_GK = find_palettes(scales.divided(weight_OI), settings.bits, rows, weights, palettes_GK)
    return scales, palettes_GK


def storable(palettes_GK: Tensor, dtype: torch.dtype) -> Tensor:
    """Round palettes to their stored dtype; values outside the range in which fp16 is precise stay in fp32."""
    largest_G = palettes_GK.abs().amax(1)
    least, largest = largest_G[largest_G > 0], largest_G.max().item()
    fits = not len(least) or _SMALLEST_FP16 <= least.min().item() <= largest < 6e4
    return palettes_GK.to(dtype) if fits else palettes_GK


def _compensate(
    weight_OI: Tensor, palettes_GK: Tensor, indices_OI: Tensor, hessian_II: Tensor, rows: int, scales: BlockScales
) -> tuple[Tensor, Tensor]:
    """Round with compensation, fit palettes to the outcome, and repeat; returns the best palettes and indices."""
    hessian_II = hessian_II.float()
    best, least = (palettes_GK, indices_OI), torch.inf
    for _ in range(_NUM_REFITS + 1):
        for candidate in (palettes_GK, _refit(weight_OI, indices_OI, palettes_GK, hessian_II, rows, scales)):
            palettes_GK, order_GK = candidate.sort(1)
            indices_OI = look_up(indices_OI, order_GK.argsort(1), rows).to(torch.uint8)
            rounded_OI = look_up(indices_OI, palettes_GK, rows).float() * scales.factors()
            error = output_error(weight_OI, rounded_OI, hessian_II)
            if error < least:
                best, least = (palettes_GK, indices_OI), error
        indices_OI = _compensated_indices(weight_OI, palettes_GK.float(), hessian_II, rows, scales)
    rounded_OI = look_up(indices_OI, palettes_GK, rows).float() * scales.factors()
    is_better = output_error(weight_OI, rounded_OI, hessian_II) < least
    return (palettes_GK, indices_OI) if is_better else best


def _compensated_indices(
    weight_OI: Tensor, palettes_GK: Tensor, hessian_II: Tensor, rows: int, scales: BlockScales
) -> Tensor:
    indices_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=weight_OI.device)

    def to_palette(values_O1: Tensor, column: int) -> Tensor:
        at = slice(column, column + 1)
        found_O1 = nearest(scales.divided(values_O1, at), palettes_GK, rows)
        indices_OI[:, column] = found_O1[:, 0]
        return look_up(found_O1, palettes_GK, rows) * scales.factors(at)

    compensated(weight_OI, hessian_II, to_palette)
    return indices_OI


def _refit(
    weight_OI: Tensor, indices_OI: Tensor, palettes_GK: Tensor, hessian_II: Tensor, rows: int, scales: BlockScales
) -> Tensor:
    """Return the palettes that minimize the error of the outputs for fixed indices: least squares for each group."""
    num_groups, num_values = palettes_GK.shape
    factors_OI = torch.ones_like(weight_OI) * scales.factors()
    products_OI = weight_OI @ hessian_II * factors_OI
    matrix_GKK = torch.zeros(num_groups, num_values, num_values, device=weight_OI.device)
    target_GK = torch.zeros(num_groups, num_values, device=weight_OI.device)
    sums_KI = torch.empty(num_values, weight_OI.shape[1], device=weight_OI.device)
    for row, (index_I, factors_I) in enumerate(zip(indices_OI.int(), factors_OI, strict=True)):
        sums_KI.zero_().index_add_(0, index_I, hessian_II * factors_I[:, None])
        matrix_GKK[row // rows].index_add_(1, index_I, sums_KI * factors_I)
        target_GK[row // rows].index_add_(0, index_I, products_OI[row])
    ridge_G = _RIDGE * matrix_GKK.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-20)
    matrix_GKK = matrix_GKK.double() + torch.diag_embed(ridge_G.double()[:, None].expand(-1, num_values))
    target_GK = target_GK.double() + ridge_G.double()[:, None] * palettes_GK.double()
    solved_GK = torch.linalg.solve(matrix_GKK, target_GK)
    fitted = torch.where(solved_GK.isfinite(), solved_GK, palettes_GK.double()).to(palettes_GK.dtype)
    return torch.where(fitted.isfinite(), fitted, palettes_GK)
