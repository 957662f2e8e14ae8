"""Modules that keep their weight as packed indices and palettes, and decode it when it is used.

Palettes are parameters: trained, their gradient is the sum of the weight's gradient over all entries with that index.
Indices never change. Only the packed bytes are kept for backward, not the decoded weight's indices.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.compress.packed_indices import unpack
from trimtab.compress.palette_product import palette_product


class ClusteredModule(nn.Module):
    """Base of modules with a clustered weight.

    Args:
        weight: The weight.
        dtype: dtype of the palettes, so of the decoded weight.
    """

    indices: Tensor

    def __init__(self, weight: ClusteredWeight, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.bits, self.rows, self.num_columns = weight.bits, weight.rows, weight.num_columns
        self.transposed = weight.transposed
        self.register_buffer("indices", weight.packed_OB)
        self.palettes = nn.Parameter(weight.palettes_GK.to(dtype), requires_grad=False)

    @property
    def clustered(self) -> ClusteredWeight:
        """The weight as it is now."""
        return ClusteredWeight(
            self.indices, self.palettes.detach(), self.bits, self.rows, self.num_columns, self.transposed
        )

    def matrix(self) -> Tensor:
        """Return the decoded matrix (O, I), differentiable with respect to the palettes."""
        matrix: Tensor = _Decode.apply(self.palettes, self.indices, self.bits, self.rows, self.num_columns)
        return matrix

    @property
    def weight(self) -> Tensor:
        """The decoded weight in the shape of the original module; decoded anew at each access."""
        return self.matrix().T if self.transposed else self.matrix()

    def extra_repr(self) -> str:
        """Describe the weight."""
        return f"{self.indices.shape[0]} × {self.num_columns}, {self.bits} bits, palettes of {self.rows} rows"


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
        """Multiply with the decoded weight, or straight from the indices where a kernel does it."""
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
        indices = unpack(self.indices[ids], self.bits, self.num_columns).int()
        indices += (ids.unsqueeze(-1) // self.rows * 2**self.bits).int()
        return self.palettes.reshape(-1).index_select(0, indices.reshape(-1)).view(indices.shape)


class _Decode(torch.autograd.Function):
    """The matrix of palettes and indices."""

    @staticmethod
    def forward(ctx: Any, palettes: Tensor, packed: Tensor, bits: int, rows: int, num_columns: int) -> Tensor:
        """Look the values up."""
        ctx.save_for_backward(packed)
        ctx.sizes = bits, rows, num_columns, palettes.shape
        return ClusteredWeight(packed, palettes, bits, rows, num_columns).matrix()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Sum the gradient of all entries with the same index, in fp32."""
        bits, rows, num_columns, shape = ctx.sizes
        (packed,) = ctx.saved_tensors
        indices = unpack(packed, bits, num_columns).int()
        groups = torch.arange(len(indices), device=indices.device, dtype=torch.int32) // rows
        indices += (groups * shape[1]).unsqueeze(1)
        total = torch.zeros(shape[0] * shape[1], dtype=torch.float32, device=indices.device)
        total.index_add_(0, indices.reshape(-1), grads[0].reshape(-1).float())
        return total.view(shape).to(grads[0].dtype), None, None, None, None
