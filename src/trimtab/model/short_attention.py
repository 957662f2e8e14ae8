"""Attention over packed rows of at most a few hundred tokens, in both directions, with dropout: for encoders on a GPU.

The kernels (`short_attention_kernels.py`) are registered as custom torch operations, so that a compiler calls them
unchanged and a trace on `meta` knows their results. Dropout draws one number from torch's generator, which seeds a
hash: resumed and recomputed steps drop the same weights, and captured steps drop different ones in every replay.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from trimtab.hardware.extras import has_package

MAX_LENGTH = 1024  # length of rows; for rows of 512 tokens the kernels are as fast as torch's
_HAS_TRITON = has_package("triton")  # checked once: a compiled block cannot look for packages
_SIZES = (16, 32, 64, 128)  # head sizes: tiles are powers of two
_HIGHEST_SEED = 2**62


def can_compute(query_THD: torch.Tensor, key_THD: torch.Tensor, max_length: int) -> bool:
    """Whether the kernels support rows of these shapes; a simulated GPU is assumed to."""
    is_here = query_THD.device.type == "meta" or (query_THD.is_cuda and _HAS_TRITON)
    has_size = query_THD.shape[-1] in _SIZES and query_THD.shape == key_THD.shape
    return is_here and has_size and max_length <= MAX_LENGTH


def short_attention(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    has_filler: bool,
    *,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Compute attention inside each row; arguments as in `trimtab.model.packed_attention.packed_attention`.

    Args:
        query_THD: Queries of all rows.
        key_THD: Keys.
        value_THD: Values.
        boundaries: Start offsets of the rows, then T.
        max_length: An upper bound for the length of rows.
        has_filler: Whether the last row is filler of any length, whose output is zero.
        scale: Factor of the scores.
        dropout: Dropout probability.
    """
    seed = torch.randint(_HIGHEST_SEED, (1,), device=query_THD.device) if dropout else boundaries
    used = query_THD.shape[-1] ** -0.5 if scale is None else scale
    tensors = (x if x.stride(-1) == 1 else x.contiguous() for x in (query_THD, key_THD, value_THD))
    output: torch.Tensor = _ShortAttention.apply(  # type: ignore[no-untyped-call]
        *tensors, boundaries, seed, max_length, has_filler, used, dropout
    )
    return output


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        boundaries: torch.Tensor,
        seed: torch.Tensor,
        max_length: int,
        has_filler: bool,
        scale: float,
        dropout: float,
    ) -> torch.Tensor:
        output, logsumexp = _forward(query, key, value, boundaries, seed, max_length, has_filler, scale, dropout)
        ctx.save_for_backward(query, key, value, output, logsumexp, boundaries, seed)
        ctx.settings = (max_length, has_filler, scale, dropout)
        return output  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = _backward(grad, *ctx.saved_tensors, *ctx.settings)
        return (*gradients, *(None,) * 6)


@torch.library.custom_op("trimtab::short_attention_forward", mutates_args=())
def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    seed: torch.Tensor,
    max_length: int,
    has_filler: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from trimtab.model import short_attention_kernels

    tensors = (query, key, value, boundaries, seed)
    return short_attention_kernels.forward(*tensors, max_length, has_filler, scale, dropout)


@_forward.register_fake
def _(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _size = query.shape
    return query.new_empty(query.shape), query.new_empty((num_heads, num_tokens), dtype=torch.float32)


@torch.library.custom_op("trimtab::short_attention_backward", mutates_args=())
def _backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    logsumexp: torch.Tensor,
    boundaries: torch.Tensor,
    seed: torch.Tensor,
    max_length: int,
    has_filler: bool,
    scale: float,
    dropout: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from trimtab.model import short_attention_kernels

    tensors = (grad, query, key, value, output, logsumexp, boundaries, seed)
    return short_attention_kernels.backward(*tensors, max_length, has_filler, scale, dropout)


@_backward.register_fake
def _(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
