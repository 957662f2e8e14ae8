"""Triton kernel for Adam with 8-bit state and bf16 weights. Imported only if Triton is installed.

It moves 10 bytes per parameter (weights and two moments read and written, the gradient read), while fp32 slices move
44 (see `quantized`), and allocates no temporaries. Random numbers for stochastic rounding are generated in the kernel.

State has the form of bitsandbytes: codes of a dynamic map, whose blocks of 256 elements share the largest magnitude as
a scale. The map has seven decades, from 1e-7 to 1, each divided evenly into twice as many intervals as the one before;
its values are the centers of these intervals, zero and one. The nearest value is found by arithmetic, not by a search.
"""

import importlib
from typing import Any

import torch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_BLOCK = 256  # elements that share a scale
_ROWS = 4  # blocks per Triton program


def _rank_source(size, FEWEST: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """The index of the nearest value among zero (index 0) and the positive values, in ascending order from index 1.

    `size` is in [0, 1]; the lowest decade has `FEWEST` values. Between two decades the middle of the neighboring values
    is a fifth of an interval above the border, because the upper interval is five times as long.
    """
    scale = tl.where(size >= 1e-6, 1e5, 1e6)
    scale = tl.where(size >= 1e-5, 1e4, scale)
    scale = tl.where(size >= 1e-4, 1e3, scale)
    scale = tl.where(size >= 1e-3, 1e2, scale)
    scale = tl.where(size >= 1e-2, 1e1, scale)
    scale = tl.where(size >= 1e-1, 1e0, scale)
    num = tl.where(size >= 1e-6, 2.0 * FEWEST, 1.0 * FEWEST)  # values in this decade
    num = tl.where(size >= 1e-5, 4.0 * FEWEST, num)
    num = tl.where(size >= 1e-4, 8.0 * FEWEST, num)
    num = tl.where(size >= 1e-3, 16.0 * FEWEST, num)
    num = tl.where(size >= 1e-2, 32.0 * FEWEST, num)
    num = tl.where(size >= 1e-1, 64.0 * FEWEST, num)
    place = (size * scale - 0.1) * (num / 0.9)  # in intervals of this decade
    border = tl.where(size >= 1e-6, 0.2, 0.25 - FEWEST / 18.0)
    rank = num - FEWEST + tl.where(place < border, 0.0, tl.minimum(tl.floor(place), num - 1.0) + 1.0)
    is_one = (size >= 1e-1) & (place >= num - 0.25)
    return tl.where(is_one, 127.0 * FEWEST + 1.0, rank).to(tl.int32)


_rank = triton.jit(_rank_source)


# fmt: off
def _adam(  # type: ignore[no-untyped-def]
    weights, gradient, codes1, codes2, scales1, scales2, map1, map2, seed, first_block, num_elements,
    rate, beta1, rest1, beta2, rest2, root2, eps, shrink, decay,
    ROUNDS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = at < num_elements
    has_block = block * BLOCK < num_elements
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    code1 = tl.load(codes1 + at, mask=inside, other=0).to(tl.int32)
    code2 = tl.load(codes2 + at, mask=inside, other=0).to(tl.int32)
    scale1 = tl.load(scales1 + block, mask=has_block, other=0.0)
    scale2 = tl.load(scales2 + block, mask=has_block, other=0.0)
    g = g + decay * w
    # an element whose gradient is not finite keeps its weight and loses its moments, as in bitsandbytes; otherwise its
    # whole block would be lost
    is_used = inside & (tl.abs(g) < float("inf"))
    m = beta1 * (tl.load(map1 + code1) * scale1[:, None]) + rest1 * g
    v = beta2 * (tl.load(map2 + code2) * scale2[:, None]) + rest2 * g * g
    m = tl.where(is_used, m, 0.0)
    v = tl.where(is_used, v, 0.0)
    w = tl.where(is_used, shrink * w - rate * m / (tl.sqrt(v) / root2 + eps), w)
    scale1 = tl.max(tl.abs(m), axis=1)
    scale2 = tl.max(v, axis=1)
    # the bound keeps the inverse finite
    rank1 = _rank(tl.abs(m) * (1.0 / tl.maximum(scale1, 1e-37))[:, None], 1)
    rank2 = _rank(v * (1.0 / tl.maximum(scale2, 1e-37))[:, None], 2)
    code1 = tl.where(m < 0, 127 - tl.minimum(rank1, 127), 127 + rank1)  # there is no minus one
    if ROUNDS:
        # adding 16 random bits carries into the upper half with the probability of the lower half; a NaN is not
        # changed, because the carry could turn it into zero
        quarter: tl.constexpr = BLOCK // 4
        count = (first_block + block)[:, None] * quarter + tl.arange(0, quarter)[None, :]
        one, two, three, four = tl.randint4x(seed, count)
        noise = tl.reshape(tl.join(tl.join(one, two), tl.join(three, four)), (ROWS, BLOCK))
        bits = w.to(tl.int32, bitcast=True)
        bits = tl.where(w == w, (bits + (noise.to(tl.int32) & 0xFFFF)) & -65536, bits)
        w = bits.to(tl.float32, bitcast=True)
    tl.store(weights + at, w.to(weights.dtype.element_ty), mask=inside)
    tl.store(codes1 + at, code1.to(tl.uint8), mask=inside)
    tl.store(codes2 + at, rank2.to(tl.uint8), mask=inside)
    tl.store(scales1 + block, scale1, mask=has_block)
    tl.store(scales2 + block, scale2, mask=has_block)


_kernel = triton.jit(_adam, do_not_specialize=["seed", "first_block"])


def step_adam(
    tensors: list[torch.Tensor],
    maps: list[torch.Tensor],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decouples: bool,
    seed: int | None,
    begin: int = 0,
) -> None:
    """Update a parameter, or a part of it.

    Args:
        tensors: Weights, gradient, codes of the first and second moment, and scales of both: contiguous 1-D tensors,
            of at most 2^30 elements, because the kernel indexes with 32 bits.
        maps: The signed and the unsigned map.
        step: Number of this step, from 1.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decouples: Whether weight decay is decoupled (AdamW) or added to the gradients (Adam).
        seed: Seed of the stochastic rounding of bf16 weights; None rounds to nearest.
        begin: Number of elements of the parameter before this part, a multiple of 256: random numbers depend on it.
    """
    num_elements, (beta1, beta2) = tensors[0].numel(), betas
    if not num_elements:
        return
    with torch.cuda.device_of(tensors[0]):  # type: ignore[no-untyped-call]
        _kernel[(triton.cdiv(num_elements, _BLOCK * _ROWS),)](
            *tensors,
            *maps,
            seed if seed is not None else 2**62,
            begin // _BLOCK,
            num_elements,
            lr / (1 - beta1**step),
            beta1,
            1 - beta1,
            beta2,
            1 - beta2,
            (1 - beta2**step) ** 0.5,
            eps,
            1 - lr * weight_decay if decouples else 1.0,
            0.0 if decouples else weight_decay,
            ROUNDS=seed is not None and tensors[0].dtype is torch.bfloat16,
            ROWS=_ROWS,
            BLOCK=_BLOCK,
        )
