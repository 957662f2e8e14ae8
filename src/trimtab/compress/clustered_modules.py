"""Modules that keep their weight as packed indices and palettes, and decode it when it is used.

Palettes are parameters. The gradient of a palette value is the sum of the weight's gradient over all entries with its
index. Indices never change. Only the packed bytes are saved for backward, not the unpacked indices.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.compress.clustered_weight import ClusteredWeight, spread
from trimtab.compress.packed_indices import unpack
from trimtab.compress.palette_product import palette_product

_NOTHING = torch.empty(0)


class ClusteredModule(nn.Module):
    """Base of modules with a clustered weight.

    Args:
        weight: The weight.
        dtype: dtype of the palettes and so of the decoded weight.
    """

    indices: Tensor
    scales: Tensor | None

    def __init__(self, weight: ClusteredWeight, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self._layout = replace(weight, packed_OB=_NOTHING, palettes_GK=_NOTHING, scales_OS=None)
        self.register_buffer("indices", weight.packed_OB)
        if dtype is torch.float16:
            weight = _in_range_of_fp16(weight)
        scales = weight.scales_OS
        # 8-bit codes stay in int8: the kernel reads them too
        is_float = scales is not None and scales.is_floating_point()
        self.register_buffer("scales", scales.to(dtype) if scales is not None and is_float else scales)
        self.palettes = nn.Parameter(weight.palettes_GK.to(dtype), requires_grad=False)

    @property
    def clustered(self) -> ClusteredWeight:
        """The current weight."""
        tensors = {"packed_OB": self.indices, "palettes_GK": self.palettes.detach(), "scales_OS": self.scales}
        return replace(self._layout, **tensors)  # type: ignore[arg-type]

    def matrix(self) -> Tensor:
        """Return the decoded matrix (O, I), differentiable with respect to the palettes."""
        matrix: Tensor = _Decode.apply(self.palettes, self.clustered)  # type: ignore[no-untyped-call]
        return matrix

    @property
    def weight(self) -> Tensor:
        """The decoded weight in the shape of the original module; decoded again at each access."""
        return self.matrix().T if self._layout.transposed else self.matrix()

    def extra_repr(self) -> str:
        """Describe the weight."""
        of = self._layout
        return f"{self.indices.shape[0]} × {of.num_columns}, {of.bits} bits, palettes of {of.rows} rows"


class ClusteredLinear(ClusteredModule):
    """A linear module, or transformers' Conv1D, with a clustered weight.

    Args:
        weight: The weight.
        bias: The bias.
        dtype: dtype of the palettes.
    """

    def __init__(
        self, weight: ClusteredWeight, bias: nn.Parameter | None = None, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(weight, dtype)
        self.out_features, self.in_features = weight.shape
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with the decoded weight, or directly with the indices if a kernel supports it."""
        y = palette_product(x, self.clustered) if not self.palettes.requires_grad else None
        if y is not None:
            return y if self.bias is None else y + self.bias
        return functional.linear(x, self.matrix().to(x.dtype), self.bias)


class ClusteredEmbedding(ClusteredModule):
    """An embedding with a clustered weight; only the rows that are used are decoded.

    Args:
        weight: The weight.
        dtype: dtype of the palettes.
    """

    def __init__(self, weight: ClusteredWeight, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(weight, dtype)
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """Decode the rows of `ids`."""
        of = self._layout
        indices = unpack(self.indices[ids], of.bits, of.num_columns).int()
        indices += (ids.unsqueeze(-1) // of.rows * 2**of.bits).int()
        values = self.palettes.reshape(-1).index_select(0, indices.reshape(-1)).view(indices.shape)
        return values if self.scales is None else values * spread(self.scales[ids], of.scale_block, of.num_columns)


def _in_range_of_fp16(weight: ClusteredWeight) -> ClusteredWeight:
    """Return a weight whose palettes are precise in fp16: larger by a power of two, and its scales smaller by it.

    Scales are up to 127, so palettes are smaller than weights by this factor: palettes of small weights would be
    rounded to the even spacing of fp16 below 6e-5. With palettes up to 1, only scales of weights that are this small
    have this spacing; and whole numbers divided by up to 2**24 are exact anyway.
    """
    largest = weight.palettes_GK.abs().max().item()
    if weight.scales_OS is None or not largest > 0:
        return weight
    exponent = min(24, max(0, math.floor(-math.log2(largest))))
    scales_OS = (weight.scales_OS.float() * 2.0**-exponent).half()
    return replace(weight, palettes_GK=weight.palettes_GK.float() * 2.0**exponent, scales_OS=scales_OS)


class _Decode(torch.autograd.Function):
    """The matrix of palettes and indices."""

    @staticmethod
    def forward(ctx: Any, palettes: Tensor, weight: ClusteredWeight) -> Tensor:
        """Look up the values."""
        ctx.weight = weight
        return weight.with_palettes(palettes).matrix()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Sum the gradient of all entries with the same index, in fp32."""
        weight: ClusteredWeight = ctx.weight
        num_groups, num_values = weight.palettes_GK.shape
        indices = weight.indices().int()
        groups = torch.arange(len(indices), device=indices.device, dtype=torch.int32) // weight.rows
        indices += (groups * num_values).unsqueeze(1)
        total = torch.zeros(num_groups * num_values, dtype=torch.float32, device=indices.device)
        total.index_add_(0, indices.reshape(-1), weight.scaled(grads[0]).reshape(-1).float())
        return total.view(num_groups, num_values).to(grads[0].dtype), None
