"""Triton kernels for the operations between the matrix products of an encoder block. Imported only with Triton.

torch runs dropout, the residual sum and the norm as three kernels, and in backward one more for each sum over tokens:
for gains and offsets of a norm, and for biases of linear layers. Here each group is one kernel. Backward sums over
tokens while it computes gradients: every program sums its tokens in registers, then one small sum over all programs
follows, so results are the same in every run.

Dropout hashes (seed, position), so backward drops what forward dropped without a mask.

Shapes: T tokens, C channels, P programs.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# (tokens of a tile, warps) of the kernels of norms; (tokens, channels, warps) of those of activations and sums. Fixed:
# nothing is timed.
NORM_FORWARD = (1, 4)
NORM_BACKWARD = (4, 4)
ACTIVATION = (32, 128, 8)
# Programs on a multiprocessor at the same time: more programs would leave more sums to add up afterwards.
NORM_PROGRAMS, ACTIVATION_PROGRAMS = 2, 4

# fmt: off


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """A hash of 32 bits: every bit of the result depends on every bit of x."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _is_kept(seed, token, channel, threshold):  # type: ignore[no-untyped-def]
    of_token = _mixed(token.to(tl.uint32) ^ _mixed(seed.to(tl.uint32)))
    of_channel = _mixed((channel + 1).to(tl.uint32) * 0x9E3779B9 ^ (seed >> 32).to(tl.uint32))
    return _mixed(of_token ^ of_channel) >= threshold.to(tl.uint32)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_forward(  # type: ignore[no-untyped-def]
    x, bias, residual, gain, offset, seeds, total, result, half, means, scales,
    num_tokens, threshold, kept_scale, eps,
    HAS_BIAS: tl.constexpr, HAS_DROPOUT: tl.constexpr, HAS_HALF: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    channel = tl.arange(0, BLOCK)[None, :]
    known = channel < WIDTH
    inside = (token < num_tokens) & known
    place = token.to(tl.int64) * WIDTH + channel
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    if HAS_DROPOUT:
        kept = _is_kept(tl.load(seeds), token, channel, threshold)
        values = tl.where(kept, values * kept_scale, 0.0)
    values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    values = values.to(total.dtype.element_ty).to(tl.float32)  # backward reads the stored values
    tl.store(total + place, values.to(total.dtype.element_ty), mask=inside)
    mean = tl.sum(values, axis=1)[:, None] / WIDTH
    centered = tl.where(inside, values - mean, 0.0)
    scale = tl.rsqrt(tl.sum(centered * centered, axis=1)[:, None] / WIDTH + eps)
    gains = tl.load(gain + channel, mask=known, other=0.0).to(tl.float32)
    offsets = tl.load(offset + channel, mask=known, other=0.0).to(tl.float32)
    normed = centered * scale * gains + offsets
    tl.store(result + place, normed.to(result.dtype.element_ty), mask=inside)
    if HAS_HALF:
        tl.store(half + place, normed.to(half.dtype.element_ty), mask=inside)
    tl.store(means + token, mean, mask=token < num_tokens)
    tl.store(scales + token, scale, mask=token < num_tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _norm_backward(  # type: ignore[no-untyped-def]
    grad, grad_half, total, means, scales, gain, seeds, grad_x, grad_residual, sums,
    num_tokens, threshold, kept_scale,
    HAS_GRAD: tl.constexpr, HAS_HALF: tl.constexpr, HAS_DROPOUT: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,  # noqa: N803
):
    channel = tl.arange(0, BLOCK)[None, :]
    known = channel < WIDTH
    gains = tl.load(gain + channel, mask=known, other=0.0).to(tl.float32)
    seed = tl.load(seeds)
    of_gain = tl.zeros((TOKENS, BLOCK), tl.float32)
    of_offset = tl.zeros((TOKENS, BLOCK), tl.float32)
    of_bias = tl.zeros((TOKENS, BLOCK), tl.float32)
    step = tl.num_programs(0) * TOKENS
    for first in range(tl.program_id(0) * TOKENS, num_tokens, step):
        token = first + tl.arange(0, TOKENS)[:, None]
        inside = (token < num_tokens) & known
        place = token.to(tl.int64) * WIDTH + channel
        above = tl.zeros((TOKENS, BLOCK), tl.float32)
        if HAS_GRAD:
            above += tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        if HAS_HALF:
            above += tl.load(grad_half + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(total + place, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(means + token, mask=token < num_tokens, other=0.0)
        scale = tl.load(scales + token, mask=token < num_tokens, other=0.0)
        normed = tl.where(inside, (values - mean) * scale, 0.0)
        of_gain += above * normed
        of_offset += above
        scaled = above * gains
        along = tl.sum(scaled * normed, axis=1)[:, None] / WIDTH
        common = tl.sum(scaled, axis=1)[:, None] / WIDTH
        below = (scaled - common - normed * along) * scale
        tl.store(grad_residual + place, below.to(grad_residual.dtype.element_ty), mask=inside)
        if HAS_DROPOUT:
            below = tl.where(_is_kept(seed, token, channel, threshold), below * kept_scale, 0.0)
        below = tl.where(inside, below, 0.0).to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, below, mask=inside)
        of_bias += below.to(tl.float32)
    target = sums + tl.program_id(0) * 3 * WIDTH + channel
    tl.store(target, tl.sum(of_gain, axis=0)[None, :], mask=known)
    tl.store(target + WIDTH, tl.sum(of_offset, axis=0)[None, :], mask=known)
    tl.store(target + 2 * WIDTH, tl.sum(of_bias, axis=0)[None, :], mask=known)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_forward(  # type: ignore[no-untyped-def]
    x, bias, result, num_tokens, width, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside = (token < num_tokens) & (channel < width)
    place = token.to(tl.int64) * width + channel
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    values += tl.load(bias + channel, mask=channel < width, other=0.0).to(tl.float32)
    values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    tl.store(result + place, values.to(result.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gelu_backward(  # type: ignore[no-untyped-def]
    grad, x, bias, grad_x, sums, num_tokens, width,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,  # noqa: N803
):
    channel = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    known = channel < width
    of_bias = tl.zeros((TOKENS, CHANNELS), tl.float32)
    biases = tl.load(bias + channel, mask=known, other=0.0).to(tl.float32)
    step = tl.num_programs(1) * TOKENS
    for first in range(tl.program_id(1) * TOKENS, num_tokens, step):
        token = first + tl.arange(0, TOKENS)[:, None]
        inside = (token < num_tokens) & known
        place = token.to(tl.int64) * width + channel
        below = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32) + biases
        share = 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))
        slope = share + values * 0.3989422804014327 * tl.exp(-0.5 * values * values)
        below = (below * slope).to(grad_x.dtype.element_ty)
        tl.store(grad_x + place, below, mask=inside)
        of_bias += below.to(tl.float32)
    tl.store(sums + tl.program_id(1) * width + channel, tl.sum(of_bias, axis=0)[None, :], mask=known)

# fmt: on


def norm_forward(
    x: Tensor, bias: Tensor | None, residual: Tensor, gain: Tensor, offset: Tensor, seed: Tensor, dropout: float,
    eps: float, total: Tensor, result: Tensor, half: Tensor, means: Tensor, scales: Tensor,
) -> None:  # fmt: skip
    """Write norm(dropout(x + bias) + residual), and what backward needs; see `fused_encoder`."""
    num_tokens, width = x.shape
    tokens, warps = NORM_FORWARD
    with torch.cuda.device(x.device):
        _norm_forward[(triton.cdiv(num_tokens, tokens),)](
            x, gain if bias is None else bias, residual, gain, offset, seed, total, result, half, means, scales,
            num_tokens, *dropout_arguments(dropout), eps,
            HAS_BIAS=bias is not None, HAS_DROPOUT=dropout > 0, HAS_HALF=half.numel() > 0,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), TOKENS=tokens, num_warps=warps,
        )  # fmt: skip


def norm_backward(
    grad: Tensor | None, grad_half: Tensor | None, total: Tensor, means: Tensor, scales: Tensor, gain: Tensor,
    seed: Tensor, dropout: float, grad_x: Tensor, grad_residual: Tensor,
) -> Tensor:  # fmt: skip
    """Write the gradients with respect to x and residual; return those for gain, offset and bias, (3, C) in fp32."""
    num_tokens, width = total.shape
    tokens, warps = NORM_BACKWARD
    programs = min(triton.cdiv(num_tokens, tokens), NORM_PROGRAMS * _num_multiprocessors(total))
    sums = total.new_empty((programs, 3, width), dtype=torch.float32)
    with torch.cuda.device(total.device):
        _norm_backward[(programs,)](
            total if grad is None else grad, total if grad_half is None else grad_half,
            total, means, scales, gain, seed, grad_x, grad_residual, sums, num_tokens, *dropout_arguments(dropout),
            HAS_GRAD=grad is not None, HAS_HALF=grad_half is not None, HAS_DROPOUT=dropout > 0,
            WIDTH=width, BLOCK=triton.next_power_of_2(width), TOKENS=tokens, num_warps=warps,
        )  # fmt: skip
    return sums.sum(0)


def gelu_forward(x: Tensor, bias: Tensor, result: Tensor) -> None:
    """Write gelu(x + bias)."""
    num_tokens, width = x.shape
    tokens, channels, warps = ACTIVATION
    with torch.cuda.device(x.device):
        _gelu_forward[(triton.cdiv(num_tokens, tokens), triton.cdiv(width, channels))](
            x, bias, result, num_tokens, width, TOKENS=tokens, CHANNELS=channels, num_warps=warps
        )


def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, grad_x: Tensor) -> Tensor:
    """Write the gradient with respect to x; return that for the bias, in fp32."""
    num_tokens, width = grad.shape
    tokens, channels, warps = ACTIVATION
    columns = triton.cdiv(width, channels)
    most = triton.cdiv(ACTIVATION_PROGRAMS * _num_multiprocessors(grad), columns)
    programs = min(triton.cdiv(num_tokens, tokens), most)
    sums = grad.new_empty((programs, width), dtype=torch.float32)
    with torch.cuda.device(grad.device):
        _gelu_backward[(columns, programs)](
            grad, x, bias, grad_x, sums, num_tokens, width, TOKENS=tokens, CHANNELS=channels, num_warps=warps
        )
    return sums.sum(0)


def dropout_arguments(dropout: float) -> tuple[int, float]:
    """The threshold below which a hash drops an element, and the factor for the kept ones."""
    return int(dropout * 2**32), 1.0 / (1.0 - dropout)


def _num_multiprocessors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count
