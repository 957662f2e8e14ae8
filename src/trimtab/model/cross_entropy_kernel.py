"""Triton kernels of the token cross-entropy. Imported only if Triton is installed.

Rows of logits are read once for the losses, and once more to write the gradient; arithmetic is fp32 in registers.
torch's operations would write fp32 copies of all logits. Shapes: N tokens, V vocabulary size.
"""

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from trimtab.model.forward import IGNORED

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")

# Logits of a row that a program holds at a time, and its warps: 16 logits per thread are two 16-byte loads in bf16.
BLOCK = 8192
NUM_WARPS = 16


# fmt: off
def _losses(  # type: ignore[no-untyped-def]
    logits, labels, losses, norms, stride, smoothing, ignored,
    WIDTH: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(losses + row, 0.0)
        return
    logits += row * stride
    largest = float("-inf")
    total = 0.0
    plain_sum = 0.0
    for start in range(0, WIDTH, BLOCK):
        at = start + tl.arange(0, BLOCK)
        values = tl.load(logits + at, mask=at < WIDTH, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(values, axis=0))
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # all logits so far are -inf, and -inf - -inf is NaN
        total = total * tl.exp(largest - shift) + tl.sum(tl.exp(values - shift), axis=0)
        largest = larger
        if SMOOTHS:
            plain_sum += tl.sum(tl.where(at < WIDTH, values, 0.0), axis=0)
    # NaN for a label outside the vocabulary: an error could only be raised after a host-device sync
    is_known = (label >= 0) & (label < WIDTH)
    log_sum = tl.where(is_known, tl.log(total), float("nan"))
    target = tl.load(logits + label, mask=is_known, other=0.0).to(tl.float32)
    loss = (largest - target) + log_sum
    if SMOOTHS:
        loss = (1.0 - smoothing) * loss + smoothing * ((largest - plain_sum / WIDTH) + log_sum)
    tl.store(losses + row, loss)
    tl.store(norms + 2 * row, largest)  # not added to the logarithm, because a large sum would round it
    tl.store(norms + 2 * row + 1, log_sum)


# fmt: off
def _gradient(  # type: ignore[no-untyped-def]
    logits, labels, norms, factors, gradient, stride, gradient_stride, factor_stride, scale, smoothing, ignored,
    WIDTH: tl.constexpr, HAS_FACTORS: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):
    # fmt: on
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    gradient += row * gradient_stride
    label = tl.load(labels + row)
    if label == ignored:
        tl.store(gradient + at, tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty), mask=inside)
        return
    factor = scale
    if HAS_FACTORS:
        factor = scale * tl.load(factors + row * factor_stride).to(tl.float32)
    values = tl.load(logits + row * stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    values = tl.exp((values - tl.load(norms + 2 * row)) - tl.load(norms + 2 * row + 1))
    if SMOOTHS:
        values = values - smoothing / WIDTH
    values = tl.where(at == label, values - (1.0 - smoothing), values)
    tl.store(gradient + at, (values * factor).to(gradient.dtype.element_ty), mask=inside)


# Only the alignment of logits matters: labels of a chunk may start anywhere, and every alignment would be compiled.
_losses_kernel = triton.jit(_losses, do_not_specialize_on_alignment=["labels", "losses", "norms"])
_gradient_kernel = triton.jit(_gradient, do_not_specialize_on_alignment=["labels", "norms", "factors"])


def token_losses(logits_NV: Tensor, labels_N: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token in fp32 (0 for ignored labels), and what `write_gradient` needs from its softmax.

    Args:
        logits_NV: Logits in bf16, fp16 or fp32; rows are contiguous.
        labels_N: Labels, contiguous; a label outside the vocabulary has the loss NaN.
        smoothing: As `label_smoothing` of `torch.nn.CrossEntropyLoss`.
    """
    num_tokens, vocab = logits_NV.shape
    losses_N = logits_NV.new_empty(num_tokens, dtype=torch.float32)
    norms_N2 = logits_NV.new_empty((num_tokens, 2), dtype=torch.float32)  # largest logit, log of the sum of exp
    if num_tokens:
        with _device_of(logits_NV):
            _losses_kernel[(num_tokens,)](
                logits_NV,
                labels_N,
                losses_N,
                norms_N2,
                logits_NV.stride(0),
                smoothing,
                IGNORED,
                WIDTH=vocab,
                SMOOTHS=smoothing > 0,
                BLOCK=_block_of(vocab),
                num_warps=NUM_WARPS,
            )
    return losses_N, norms_N2


def write_gradient(
    logits_NV: Tensor,
    labels_N: Tensor,
    norms_N2: Tensor,
    smoothing: float,
    factors: Tensor | float,
    gradient_NV: Tensor,
) -> None:
    """Write the gradient of the losses with respect to the logits, times a factor.

    Args:
        logits_NV: As in `token_losses`.
        labels_N: As in `token_losses`.
        norms_N2: The second result of `token_losses`.
        smoothing: As in `token_losses`.
        factors: The gradient with respect to the loss of each token, or one number for all tokens.
        gradient_NV: The result; may be `logits_NV`.
    """
    num_tokens, vocab = logits_NV.shape
    if not num_tokens:
        return
    block = _block_of(vocab)
    scale, factors_N = (1.0, factors) if isinstance(factors, Tensor) else (factors, None)
    with _device_of(logits_NV):
        _gradient_kernel[(num_tokens, triton.cdiv(vocab, block))](
            logits_NV,
            labels_N,
            norms_N2,
            norms_N2 if factors_N is None else factors_N,
            gradient_NV,
            logits_NV.stride(0),
            gradient_NV.stride(0),
            0 if factors_N is None else factors_N.stride(0),
            scale,
            smoothing,
            IGNORED,
            WIDTH=vocab,
            HAS_FACTORS=factors_N is not None,
            SMOOTHS=smoothing > 0,
            BLOCK=block,
            num_warps=NUM_WARPS,
        )


def _block_of(vocab: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(vocab)))


def _device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Make the tensors' device current for Triton's launch; Triton's interpreter runs on the CPU."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
