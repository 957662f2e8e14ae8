"""Token cross-entropy from logits in one pass, whose gradient overwrites the logits.

The plain loss makes fp32 copies of half-precision logits, their log-softmax and its gradient; here the logits are the
only tensor of their size. The kernels are in `trimtab.model.cross_entropy_kernel`.
Shapes: N tokens, V vocabulary size.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import LossError
from trimtab.hardware.extras import has_package
from trimtab.log import log_info_once

MIN_CAPABILITY = (8, 0)  # compute capability of NVIDIA GPUs that Triton fully supports
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fused_cross_entropy(logits_NV: Tensor, labels_N: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the loss of each token in fp32: 0 if the label is -100, NaN if it is not in the vocabulary.

    Backward writes the gradient into the memory of the logits if they are the result of an operation that does not need
    them in its own backward; it runs once. There is no host-device sync.

    Raises:
        LossError: The kernels do not support the device or the dtype.
    """
    if kernels_for(logits_NV.device) is None or logits_NV.dtype not in _DTYPES:
        raise LossError(
            f"memory.loss: fused does not support logits in {logits_NV.dtype} on {logits_NV.device.type}",
            "memory.loss: plain, or chunked",
        )
    apply: Callable[..., Tensor] = _FusedCrossEntropy.apply
    if logits_NV.stride(-1) != 1:
        logits_NV = logits_NV.contiguous()
    return apply(logits_NV, labels_N.contiguous(), label_smoothing, may_overwrite(logits_NV))


@functools.cache
def kernels_for(device: torch.device) -> Any:
    """The module with the Triton kernels if they work on the device; else None."""
    if device.type != "cuda" or not has_package("triton"):
        return None
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return None
    try:
        kernels: Any = importlib.import_module("trimtab.model.cross_entropy_kernel")
        logits, labels = torch.zeros((1, 16), device=device), torch.zeros(1, dtype=torch.long, device=device)
        _, norms = kernels.token_losses(logits, labels, 0.0)
        kernels.write_gradient(logits, labels, norms, 0.0, 1.0, logits)
    except Exception as error:  # Triton needs a C compiler and raises arbitrary exceptions if it fails
        log_info_once(f"the loss is computed without Triton kernels, because they do not run: {error}")
        return None
    return kernels


def kernels_of_chunks(dtype: torch.dtype, device: torch.device) -> Any:
    """The kernels for the chunked loss; None to use torch's operations."""
    return kernels_for(device) if dtype in _DTYPES else None


class _FusedCrossEntropy(torch.autograd.Function):
    """See `fused_cross_entropy`."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, smoothing: float, overwrites: bool) -> Tensor:
        losses_N: Tensor
        losses_N, norms_N2 = kernels_for(logits_NV.device).token_losses(logits_NV, labels_N, smoothing)
        ctx.save_for_backward(logits_NV, labels_N, norms_N2)
        ctx.smoothing, ctx.overwrites, ctx.has_run = smoothing, overwrites, False
        return losses_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.has_run and ctx.overwrites:
            raise RuntimeError("backward of a fused loss can run only once: its gradient overwrites the logits")
        ctx.has_run = True
        logits_NV, labels_N, norms_N2 = ctx.saved_tensors
        gradient_NV = logits_NV.detach() if ctx.overwrites else torch.empty_like(logits_NV)
        kernels = kernels_for(logits_NV.device)
        kernels.write_gradient(logits_NV, labels_N, norms_N2, ctx.smoothing, grad_N, gradient_NV)
        if ctx.overwrites:
            # autograd does not see the kernel's writes: another backward that needs the logits has to raise an error
            torch.autograd.graph.increment_version(logits_NV)
        return gradient_NV, None, None, None


_VIEWS = frozenset(("ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0"))
_NEED_NO_RESULT = frozenset(
    (
        *("MmBackward0", "AddmmBackward0", "BmmBackward0", "LinearBackward0"),
        *("AddBackward0", "SubBackward0", "MulBackward0", "DivBackward0", "ToCopyBackward0", "CloneBackward0"),
    )
)


def may_overwrite(tensor: Tensor) -> bool:
    """Whether `tensor` is the result of an operation whose backward does not need it; the backward of tanh does."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _NEED_NO_RESULT
