"""The Triton kernel of rotary position embeddings. Imported only if Triton is installed.

One program rotates all heads of one token, with fp32 arithmetic in registers: every number is read and written once.
Shapes: B rows, H heads, L positions, D head size.
"""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

_NUMBERS_PER_WARP = 1024  # numbers in one half of all heads


# fmt: off
def _rotate(  # type: ignore[no-untyped-def]
    x, result, cos, sin, num_tokens, x_row, x_head, x_token, result_row, result_token, angle_row, angle_token,
    NUM_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_HALF: tl.constexpr,  # noqa: N803
    IS_BACKWARD: tl.constexpr,  # noqa: N803
):
    # fmt: on
    program = tl.program_id(0).to(tl.int64)
    row, token = program // num_tokens, program % num_tokens
    head = tl.arange(0, BLOCK_HEADS)[:, None]
    place = tl.arange(0, BLOCK_HALF)[None, :]
    known = place < HALF
    inside = (head < NUM_HEADS) & known
    angle = row * angle_row + token * angle_token + place
    cos_1 = tl.load(cos + angle, mask=known, other=0.0).to(tl.float32)
    cos_2 = tl.load(cos + angle + HALF, mask=known, other=0.0).to(tl.float32)
    sin_1 = tl.load(sin + angle, mask=known, other=0.0).to(tl.float32)
    sin_2 = tl.load(sin + angle + HALF, mask=known, other=0.0).to(tl.float32)
    source = x + row * x_row + token * x_token + head.to(tl.int64) * x_head + place
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if IS_BACKWARD:
        left = first * cos_1 + second * sin_2
        right = second * cos_2 - first * sin_1
    else:
        left = first * cos_1 - second * sin_1
        right = second * cos_2 + first * sin_2
    target = result + row * result_row + token * result_token + head * (2 * HALF) + place
    tl.store(target, left.to(result.dtype.element_ty), mask=inside)
    tl.store(target + HALF, right.to(result.dtype.element_ty), mask=inside)


_kernel = triton.jit(_rotate)


def rotate(x_BHLD: Tensor, cos_BLD: Tensor, sin_BLD: Tensor, dtype: torch.dtype, *, is_backward: bool) -> Tensor:
    """Return rotated heads, or the gradient with respect to the unrotated heads, laid out token by token (BLHD).

    Args:
        x_BHLD: Queries or keys, or their gradients.
        cos_BLD: Cosines of all positions; one row may apply to all rows.
        sin_BLD: Sines of all positions.
        dtype: The dtype of the result.
        is_backward: Whether `x_BHLD` is a gradient.
    """
    num_rows, num_heads, num_tokens, width = x_BHLD.shape
    x_BHLD, cos_BLD, sin_BLD = _dense(x_BHLD), _dense(cos_BLD), _dense(sin_BLD)
    if cos_BLD.stride() != sin_BLD.stride():
        cos_BLD, sin_BLD = cos_BLD.contiguous(), sin_BLD.contiguous()
    result_BLHD = x_BHLD.new_empty((num_rows, num_tokens, num_heads, width), dtype=dtype)
    half = width // 2
    block_heads, block_half = triton.next_power_of_2(num_heads), triton.next_power_of_2(half)
    if x_BHLD.numel():
        with _device_of(x_BHLD):
            _kernel[(num_rows * num_tokens,)](
                x_BHLD,
                result_BLHD,
                cos_BLD,
                sin_BLD,
                num_tokens,
                x_BHLD.stride(0),
                x_BHLD.stride(1),
                x_BHLD.stride(2),
                result_BLHD.stride(0),
                result_BLHD.stride(1),
                cos_BLD.stride(0) if cos_BLD.shape[0] > 1 else 0,
                cos_BLD.stride(1),
                NUM_HEADS=num_heads,
                HALF=half,
                BLOCK_HEADS=block_heads,
                BLOCK_HALF=block_half,
                IS_BACKWARD=is_backward,
                num_warps=max(1, min(8, block_heads * block_half // _NUMBERS_PER_WARP * 2)),
            )
    return result_BLHD.transpose(1, 2)


def _dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, with a contiguous last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensor's device current for Triton's launch; Triton's interpreter runs on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
