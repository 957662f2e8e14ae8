"""Triton kernel for Adam on bf16 weights and state with stochastic rounding. Imported only if Triton is installed.

It moves 14 bytes per parameter, while fp32 slices move 126 (see `stochastic_rounding`), and allocates no temporaries.
Random numbers are generated in the kernel.
"""

import importlib
from typing import Any

import torch

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_BLOCK = 1024  # elements per Triton program
LONGEST = 2**31 - _BLOCK  # the kernel indexes elements with 32 bits


# fmt: off
def _adam(  # type: ignore[no-untyped-def]
    weights, gradient, first, second, seed, number, num_elements,
    rate, beta1, rest1, beta2, rest2, root2, eps, shrink, decay, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    w = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gradient + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(second + at, mask=inside, other=0.0).to(tl.float32)
    g = g + decay * w
    m = beta1 * m + rest1 * g
    v = beta2 * v + rest2 * g * g
    w = shrink * w - rate * m / (tl.sqrt(v) / root2 + eps)
    noise_w, noise_m, noise_v, _ = tl.randint4x(seed + number, at)
    # adding 16 random bits carries into the upper half with the probability of the lower half; a NaN is not changed,
    # because the carry could turn it into zero
    bits_w = w.to(tl.int32, bitcast=True)
    bits_m = m.to(tl.int32, bitcast=True)
    bits_v = v.to(tl.int32, bitcast=True)
    bits_w = tl.where(w == w, (bits_w + (noise_w.to(tl.int32) & 0xFFFF)) & -65536, bits_w)
    bits_m = tl.where(m == m, (bits_m + (noise_m.to(tl.int32) & 0xFFFF)) & -65536, bits_m)
    bits_v = tl.where(v == v, (bits_v + (noise_v.to(tl.int32) & 0xFFFF)) & -65536, bits_v)
    tl.store(weights + at, bits_w.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    tl.store(first + at, bits_m.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)
    tl.store(second + at, bits_v.to(tl.float32, bitcast=True).to(tl.bfloat16), mask=inside)


_kernel = triton.jit(_adam, do_not_specialize=["seed", "number"])


def step_adam(
    parameters: list[list[torch.Tensor]],
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decouples: bool,
    seed: int,
) -> None:
    """Update parameters of one device that have the same step count.

    Args:
        parameters: Weights, gradient, first and second moment of each parameter: contiguous 1-D bf16 tensors.
        step: Number of this step, from 1.
        lr: Learning rate.
        betas: Decay rates of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Weight decay.
        decouples: Whether weight decay is decoupled (AdamW) or added to the gradients (Adam).
        seed: Seed of the stochastic rounding.
    """
    device = parameters[0][0].device
    beta1, beta2 = betas
    with torch.cuda.device(device):
        for number, tensors in enumerate(parameters):
            num_elements = tensors[0].numel()
            if not num_elements:
                continue
            _kernel[(triton.cdiv(num_elements, _BLOCK),)](
                *tensors,
                seed,
                number,
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
                BLOCK=_BLOCK,
            )
