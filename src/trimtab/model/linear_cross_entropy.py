"""Cross-entropy from hidden states and the weight of the output layer, without a tensor of all logits.

The forward pass computes logits, losses and gradients one chunk of tokens at a time; the backward pass only multiplies
the gradients by that of the loss. Products run in the autocast dtype, with the same rounding as the plain loss; softmax
and sums over chunks are fp32.
Shapes: N tokens, D hidden size, V vocabulary size, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.model.forward import IGNORED
from trimtab.model.token_cross_entropy import kernels_of_chunks

_CHUNK_BYTES = 64 * 2**20  # maximum size of a chunk's logits in fp32, and of other temporaries
_CHUNK_BYTES_PER_LOGIT = 8  # the logits, their log-softmax in fp32 and, in half precision, the rounded gradient
_MIN_CHUNK_TOKENS = 256  # with fewer tokens, a product is limited by reading the weight, not by compute
# Gradients in fp16 are multiplied by this factor: fp16 underflows below 6e-8, and many probabilities of a large
# vocabulary are smaller. A larger factor could overflow, which no loss scaler would see before the backward pass.
_FP16_SCALE = 16.0


@dataclass(frozen=True)
class Job:
    """Options of one call.

    Args:
        label_smoothing: As in `torch.nn.CrossEntropyLoss`.
        after: Elementwise function that the model applies to its logits before the loss; None if there is none.
        counts_hits: Whether to count labels that are the most likely token.
        at_most: Upper bound of the number of labels, known without a host-device sync.
        softcap: The bound c if `after` is c * tanh(logits / c), for kernels that support only this function.
    """

    label_smoothing: float = 0.0
    after: Callable[[Tensor], Tensor] | None = None
    counts_hits: bool = False
    at_most: int | None = None
    softcap: float | None = None


Kernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, Job], Tensor]


def chunked_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, job: Job
) -> Tensor:
    """Return the loss summed over all labels and the number of hits (0 if not counted), as one tensor.

    There is no host-device sync. Tokens without a label are skipped on a CPU, or if `job.at_most` bounds the number of
    labels; otherwise they are computed with weight 0.
    """
    apply: Callable[..., Tensor] = ChunkedCrossEntropy.apply
    return apply(hidden_ND, weight_VD, bias_V, labels_N, job, torch.is_grad_enabled())


def liger_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, job: Job
) -> Tensor:
    """The same with the kernels of liger-kernel, which do one host-device sync in each pass."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    positions = (labels_N != IGNORED).nonzero().squeeze(1)
    if not len(positions):  # gives zero gradients for every parameter, which DDP of other processes waits for
        return chunked_cross_entropy(hidden_ND, weight_VD, bias_V, labels_N, job)
    labels_N = labels_N.index_select(0, positions)
    dtype = compute_dtype(hidden_ND)
    hidden_ND = hidden_ND.index_select(0, positions).to(dtype)
    trains = torch.is_grad_enabled() and (weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad))
    if trains and not hidden_ND.requires_grad:  # liger computes no gradient of the weight otherwise
        hidden_ND = hidden_ND.detach().requires_grad_()
    with _no_autocast(hidden_ND):
        total, _, _, predicted = LigerFusedLinearCrossEntropyFunction.apply(
            hidden_ND,
            weight_VD.to(dtype),
            labels_N,
            None if bias_V is None else bias_V.to(dtype),
            None,  # class weights
            IGNORED,
            0.0,  # factor of the z-loss
            job.label_smoothing,
            "sum",
            job.softcap,
            False,  # return the z-loss
            torch.float32 if weight_VD.requires_grad else None,  # dtype in which weight gradients are accumulated
            False,  # scale losses by probability
            False,  # return the accuracy
            job.counts_hits,  # return the predicted tokens
        )
    hits = (predicted == labels_N).sum() if job.counts_hits else torch.zeros_like(total)
    return torch.stack([total.float(), hits.float()])


def logits_bytes(rows: int, length: int, vocab: int) -> int:
    """Size of all logits of a batch in fp32; the plain loss holds several tensors of this size."""
    return 4 * rows * length * vocab


def chunk_rows(num_tokens: int, vocab: int, bytes_per_logit: int = _CHUNK_BYTES_PER_LOGIT) -> int:
    """Tokens per chunk: within `_CHUNK_BYTES`, but at least `_MIN_CHUNK_TOKENS`, with chunks of about equal size.

    Chunks that hold fewer bytes per logit have more tokens: the fp32 sum of weight gradients is read and written for
    every chunk.
    """
    most = max(_MIN_CHUNK_TOKENS, _CHUNK_BYTES // (4 * vocab)) * _CHUNK_BYTES_PER_LOGIT // bytes_per_logit
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype in which a product with `tensor` runs."""
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return tensor.dtype


class ChunkedCrossEntropy(torch.autograd.Function):
    """See `chunked_cross_entropy`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        job: Job,
        keeps_gradients: bool,
    ) -> Tensor:
        """Compute losses, hits and gradients chunk by chunk."""
        needs_hidden, needs_weight, needs_bias = (need and keeps_gradients for need in ctx.needs_input_grad[:3])
        dtype = compute_dtype(hidden_ND)
        positions = _labelled(labels_N, job.at_most)
        all_hidden, all_weight = hidden_ND, weight_VD
        if positions is not None:
            hidden_ND, labels_N = hidden_ND.index_select(0, positions), labels_N.index_select(0, positions)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        scale = _FP16_SCALE if dtype is torch.float16 else 1.0
        num_tokens, vocab = len(labels_N), len(weight_VD)
        losses_N = hidden_ND.new_zeros(num_tokens, dtype=torch.float32)
        hits = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias = hidden_ND.new_zeros(vocab, dtype=torch.float32) if needs_bias else None
        needs_any = needs_hidden or needs_weight or needs_bias
        kernels = kernels_of_chunks(dtype, hidden_ND.device)
        is_overwritten = kernels is not None and job.after is None
        size = chunk_rows(num_tokens, vocab, dtype.itemsize if is_overwritten else _CHUNK_BYTES_PER_LOGIT)
        chunk_type = _Chunk if kernels is None else partial(_KernelChunk, kernels)
        with _no_autocast(hidden_ND):
            for rows in _slices(num_tokens, size):
                chunk = chunk_type(functional.linear(hidden_ND[rows], weight_VD, bias), labels_N[rows], job, needs_any)
                losses_N[rows] = chunk.losses_C
                if job.counts_hits:
                    hits += chunk.num_hits()
                if not needs_any:
                    continue
                grad_CV = chunk.gradient(scale)
                if grad_bias is not None:
                    grad_bias += grad_CV.sum(dim=0, dtype=torch.float32)
                grad_CV = grad_CV.to(dtype)
                if grad_hidden is not None:
                    torch.mm(grad_CV, weight_VD, out=grad_hidden[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, grad_CV, hidden_ND[rows])
                del chunk, grad_CV  # frees memory for the next chunk
        ctx.kept = (grad_hidden, grad_weight, grad_bias, positions) if needs_any else None
        ctx.hidden_like = (all_hidden.shape, all_hidden.dtype)
        ctx.dtypes = (all_weight.dtype, None if bias_V is None else bias_V.dtype)
        ctx.scale = scale
        return torch.stack([losses_N.sum(), hits])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """Multiply the gradients from the forward pass by the gradient of the loss."""
        if ctx.kept is None:
            raise RuntimeError("backward of a chunked loss can run only once: it changes its gradients in place")
        (grad_hidden, grad_weight, grad_bias, positions), ctx.kept = ctx.kept, None
        factor = grad_sums[0] / ctx.scale
        if grad_hidden is not None:
            shape, dtype = ctx.hidden_like
            grad_hidden = _placed(_times(grad_hidden, factor), positions, shape, dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.dtypes[0])
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(factor).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Chunk:
    """Logits, losses and gradients of a chunk of tokens."""

    def __init__(self, raw_CV: Tensor, labels_C: Tensor, job: Job, needs_gradient: bool) -> None:
        self._smoothing = job.label_smoothing
        self._raw_CV = raw_CV
        self._logits_CV = _after_head(raw_CV, job, needs_gradient)
        self._has_label_C = labels_C != IGNORED
        self._labels_C = labels_C
        self._targets_C1 = labels_C.where(self._has_label_C, 0)[:, None]
        self._log_probs_CV = functional.log_softmax(self._logits_CV.detach(), dim=-1, dtype=torch.float32)
        losses_C = -self._log_probs_CV.gather(1, self._targets_C1).squeeze(1)
        if self._smoothing:
            uniform_C = -self._log_probs_CV.mean(dim=-1)
            losses_C = (1 - self._smoothing) * losses_C + self._smoothing * uniform_C
        self.losses_C = losses_C.masked_fill(~self._has_label_C, 0.0)

    def num_hits(self) -> Tensor:
        """Number of labels that are the most likely token."""
        return (self._logits_CV.detach().argmax(dim=-1) == self._labels_C).sum()

    def gradient(self, scale: float) -> Tensor:
        """Gradient of the summed losses for the head's output, times `scale`. Overwrites the chunk's buffers."""
        grad_CV = self._log_probs_CV.exp_()
        if self._smoothing:
            grad_CV -= self._smoothing / grad_CV.shape[1]
        # scatter_ and not scatter_add_, which is not deterministic on every device
        grad_CV.scatter_(1, self._targets_C1, grad_CV.gather(1, self._targets_C1) - (1 - self._smoothing))
        grad_CV.masked_fill_(~self._has_label_C[:, None], 0.0)
        if scale != 1.0:
            grad_CV *= scale
        if self._logits_CV is self._raw_CV:
            return grad_CV
        (grad_CV,) = torch.autograd.grad(self._logits_CV, self._raw_CV, grad_CV.to(self._logits_CV.dtype))
        return grad_CV


class _KernelChunk:
    """A chunk with Triton kernels: no fp32 copies, and the gradient replaces the logits if nothing follows them.

    Args:
        kernels: See `trimtab.model.token_cross_entropy.kernels_for`.
    """

    def __init__(self, kernels: Any, raw_CV: Tensor, labels_C: Tensor, job: Job, needs_gradient: bool) -> None:
        self._kernels, self._smoothing = kernels, job.label_smoothing
        self._raw_CV, self._labels_C = raw_CV, labels_C.contiguous()
        self._logits_CV = _after_head(raw_CV, job, needs_gradient)
        logits_CV = self._logits_CV.detach()
        self.losses_C, self._norms_C2 = kernels.token_losses(logits_CV, self._labels_C, self._smoothing)

    def num_hits(self) -> Tensor:
        """See `_Chunk`."""
        return (self._logits_CV.detach().argmax(dim=-1) == self._labels_C).sum()

    def gradient(self, scale: float) -> Tensor:
        """See `_Chunk`; in the dtype of the output of the head."""
        logits_CV = self._logits_CV.detach()
        is_raw = self._logits_CV is self._raw_CV
        grad_CV = logits_CV if is_raw else torch.empty_like(logits_CV)  # operations after the head may need its results
        self._kernels.write_gradient(logits_CV, self._labels_C, self._norms_C2, self._smoothing, scale, grad_CV)
        if not is_raw:
            (grad_CV,) = torch.autograd.grad(self._logits_CV, self._raw_CV, grad_CV)
        return grad_CV


def _after_head(raw_CV: Tensor, job: Job, needs_gradient: bool) -> Tensor:
    """The logits of a chunk: the output of the head, after the model's operations on it."""
    if job.after is None:
        return raw_CV
    with torch.set_grad_enabled(needs_gradient):
        return job.after(raw_CV.requires_grad_(needs_gradient))


def _labelled(labels_N: Tensor, at_most: int | None) -> Tensor | None:
    """Positions of the tokens to compute, labelled ones first; None for all positions."""
    if labels_N.device.type == "cpu" and at_most is None:
        positions = (labels_N != IGNORED).nonzero().squeeze(1)
        return None if len(positions) == len(labels_N) else positions
    if at_most is None or at_most >= len(labels_N):
        return None
    return (labels_N == IGNORED).to(torch.uint8).argsort(stable=True)[:at_most]


def _slices(num_tokens: int, size: int) -> Iterator[slice]:
    for start in range(0, num_tokens, size):
        yield slice(start, min(start + size, num_tokens))


def _add_product(sum_VD: Tensor, grad_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add grad^T hidden to an fp32 sum, without a temporary of its size."""
    if grad_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(grad_CV.t(), hidden_CD)
        return
    if _sums_half_in_fp32(sum_VD):
        torch.addmm(sum_VD, grad_CV.t(), hidden_CD, out_dtype=torch.float32, out=sum_VD)
        return
    # fp16 products are computed in fp32: their sum over many tokens can overflow, regardless of the loss scale.
    dtype = torch.float32 if grad_CV.dtype in (torch.float16, torch.float64) else grad_CV.dtype
    hidden_CD = hidden_CD.to(dtype)
    num_rows = max(1, _CHUNK_BYTES // (4 * (hidden_CD.shape[1] + hidden_CD.shape[0])))
    for start in range(0, len(sum_VD), num_rows):
        part = slice(start, start + num_rows)
        sum_VD[part] += grad_CV[:, part].to(dtype).t() @ hidden_CD


def _sums_half_in_fp32(tensor: Tensor) -> bool:
    """Whether the device has half-precision products with fp32 accumulation and output (`out_dtype`)."""
    if tensor.device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def _times(tensor_ND: Tensor, factor: Tensor) -> Tensor:
    """Multiply in place with one rounding; torch would first round the factor to the half-precision dtype."""
    if tensor_ND.dtype == factor.dtype:
        return tensor_ND.mul_(factor)
    num_rows = max(1, _CHUNK_BYTES // (4 * max(1, tensor_ND.shape[1])))
    for part_ND in torch.split(tensor_ND, num_rows):
        part_ND.copy_(part_ND.to(factor.dtype) * factor)
    return tensor_ND


def _placed(gradient: Tensor, positions: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Put the gradients at their positions, zeros elsewhere."""
    gradient = gradient.to(dtype)
    if positions is None:
        return gradient
    return gradient.new_zeros(shape).index_copy_(0, positions, gradient)


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
