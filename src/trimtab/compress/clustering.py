"""Cluster weights: choose them, find palettes and indices, with or without what calibration rows say about inputs.

Shapes: O rows and I columns of a weight, G groups of rows, K values of a palette.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.compress.clustered_weight import ClusteredWeight, spread
from trimtab.compress.error_compensation import compensated, output_error
from trimtab.compress.palettes import find_palettes, look_up, nearest, rows_of_group
from trimtab.errors import RecipeError
from trimtab.model.quantization import quantizable

PER = ("tensor", "rows", "channel")
IMPORTANCE = ("none", "activations", "gradients")
_MIN_ENTRIES = 2048  # smaller weights stay as they are: they save nothing that matters
_NUM_REFITS = 2
_RIDGE = 1e-3  # pulls palette values that few entries use to where they were


@dataclass(frozen=True)
class ClusterSettings:
    """How weights are clustered.

    Args:
        bits: Bits of an index, 1 to 8.
        per: What shares a palette: a "tensor", a group of "rows", or a "channel" (one row).
        rows: Rows of a group, for per="rows"; None chooses by size, so that palettes add at most 1/32 bit a weight, or
            a quarter of a bit without scales.
        scale_block: Columns of a row that share a scale in fp16; 0 for none. A scale is the entry of the largest
            magnitude, with its sign: every block then has an entry 1, which the palette represents well.
        importance: Weights of squared errors: "none", "activations" (mean square of the input that an entry is
            multiplied with) or "gradients" (mean squared gradient of the entry).
        compensate: Spread the error of each column over later columns.
        embeddings: Cluster embeddings and the output layer too.
        palette_dtype: dtype of stored palettes; fp16 where its range suffices, or fp32.
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
            raise RecipeError(f"--bits {self.bits} is not possible", "--bits 1 to --bits 8")
        if self.per not in PER:
            raise RecipeError(f"--per {self.per} is not known", f"one of {', '.join(PER)}")
        if self.importance not in IMPORTANCE:
            raise RecipeError(f"--importance {self.importance} is not known", f"one of {', '.join(IMPORTANCE)}")
        if self.rows is not None and self.per != "rows":
            raise RecipeError(f"--rows {self.rows} has no effect with --per {self.per}", "--per rows, or no --rows")
        if self.rows is not None and self.rows < 1:
            raise RecipeError(f"--rows {self.rows} is not a group", "--rows 1 or more")
        if self.scale_block < 0:
            raise RecipeError(f"--scale-block {self.scale_block} is not a block", "--scale-block 64, or 0 for none")

    @property
    def needs_calibration(self) -> bool:
        """Whether rows of data are needed."""
        return self.compensate or self.importance != "none"


def clusterable(model: Any, settings: ClusterSettings) -> dict[str, str]:
    """Return the weights to cluster: the parameter's (first) name and a module that holds it.

    Linear modules of the base model, and embeddings and the output layer if the settings say so; not task heads.
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
        settings: How.
        hessian_II: Mean of x xᵀ over inputs of the module; needed for "activations" and to compensate.
        gradients_OI: Mean squared gradients; needed for "gradients".
        transposed: Whether the module stores the transpose.
    """
    weight_OI = weight_OI.float()
    num_rows, num_columns = weight_OI.shape
    sharing = 32 if settings.scale_block else 4
    rows = rows_of_group((num_rows, num_columns), settings.bits, settings.per, settings.rows, sharing)
    importance = gradients_OI if settings.importance == "gradients" else None
    if settings.importance == "activations" and hessian_II is not None:
        importance = hessian_II.diagonal()
    scaling = _Scaling(weight_OI, settings)
    palettes_GK = find_palettes(scaling.divided(weight_OI), settings.bits, rows, scaling.importance(importance))
    palettes_GK = storable(palettes_GK, settings.palette_dtype)
    indices_OI = nearest(scaling.divided(weight_OI), palettes_GK, rows)
    if settings.compensate and hessian_II is not None:
        palettes_GK, indices_OI = _compensate(weight_OI, palettes_GK, indices_OI, hessian_II, rows, scaling)
    others = {"scales_OS": scaling.scales_OS, "scale_block": settings.scale_block, "transposed": transposed}
    return ClusteredWeight.from_indices(indices_OI, palettes_GK, rows, **others)


class _Scaling:
    """Scales of blocks of columns; does nothing without scales."""

    def __init__(self, weight_OI: Tensor, settings: ClusterSettings) -> None:
        self.scales_OS: Tensor | None = None
        self._factors_OI: Tensor | None = None
        block, num_columns = settings.scale_block, weight_OI.shape[1]
        if block:
            padded = functional.pad(weight_OI, (0, -num_columns % block)).view(len(weight_OI), -1, block)
            largest = padded.gather(2, padded.abs().argmax(2, keepdim=True)).squeeze(2)
            self.scales_OS = storable(largest, settings.palette_dtype)
            factors = spread(self.scales_OS.float(), block, num_columns)
            self._factors_OI = torch.where(factors == 0, torch.ones_like(factors), factors)

    def factors(self, columns: slice = slice(None)) -> Tensor | float:
        """Return the scales of columns."""
        return 1.0 if self._factors_OI is None else self._factors_OI[:, columns]

    def divided(self, weight_OI: Tensor) -> Tensor:
        """Return the weight as multiples of its scales, which palettes are made of."""
        return weight_OI / self.factors()

    def importance(self, importance: Tensor | None) -> Tensor | None:
        """Return the importance of errors of the divided weight."""
        if self._factors_OI is None:
            return importance
        return self._factors_OI.square() * (1.0 if importance is None else importance)


def storable(palettes_GK: Tensor, dtype: torch.dtype) -> Tensor:
    """Round palettes to their stored dtype; values outside of the range in which fp16 is precise stay in fp32."""
    largest = palettes_GK.abs().max().item()
    return palettes_GK.to(dtype) if 1e-3 <= largest < 6e4 else palettes_GK


def _compensate(
    weight_OI: Tensor, palettes_GK: Tensor, indices_OI: Tensor, hessian_II: Tensor, rows: int, scaling: _Scaling
) -> tuple[Tensor, Tensor]:
    """Round with compensation, fit palettes to the outcome, and repeat; returns the best palettes and indices."""
    hessian_II = hessian_II.float()
    best, least = (palettes_GK, indices_OI), torch.inf
    for _ in range(_NUM_REFITS + 1):
        for candidate in (palettes_GK, _refit(weight_OI, indices_OI, palettes_GK, hessian_II, rows, scaling)):
            palettes_GK, order_GK = candidate.sort(1)
            indices_OI = look_up(indices_OI, order_GK.argsort(1), rows).to(torch.uint8)
            rounded_OI = look_up(indices_OI, palettes_GK, rows).float() * scaling.factors()
            error = output_error(weight_OI, rounded_OI, hessian_II)
            if error < least:
                best, least = (palettes_GK, indices_OI), error
        indices_OI = _compensated_indices(weight_OI, palettes_GK.float(), hessian_II, rows, scaling)
    rounded_OI = look_up(indices_OI, palettes_GK, rows).float() * scaling.factors()
    is_better = output_error(weight_OI, rounded_OI, hessian_II) < least
    return (palettes_GK, indices_OI) if is_better else best


def _compensated_indices(
    weight_OI: Tensor, palettes_GK: Tensor, hessian_II: Tensor, rows: int, scaling: _Scaling
) -> Tensor:
    indices_OI = torch.empty(weight_OI.shape, dtype=torch.uint8, device=weight_OI.device)

    def to_palette(values_O1: Tensor, column: int) -> Tensor:
        factors_O1 = scaling.factors(slice(column, column + 1))
        found_O1 = nearest(values_O1 / factors_O1, palettes_GK, rows)
        indices_OI[:, column] = found_O1[:, 0]
        return look_up(found_O1, palettes_GK, rows) * factors_O1

    compensated(weight_OI, hessian_II, to_palette)
    return indices_OI


def _refit(
    weight_OI: Tensor, indices_OI: Tensor, palettes_GK: Tensor, hessian_II: Tensor, rows: int, scaling: _Scaling
) -> Tensor:
    """Return the palettes that minimize the error of the outputs for fixed indices: least squares for each group."""
    num_groups, num_values = palettes_GK.shape
    factors_OI = torch.ones_like(weight_OI) * scaling.factors()
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
