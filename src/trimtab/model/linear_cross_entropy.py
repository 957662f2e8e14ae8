"""Cross-entropy straight from hidden states and the weight of a head, without a tensor of all logits.

A chunk of tokens at a time gets its logits, its losses and, where something trains, its share of the gradients, all in
the forward pass; the backward pass only multiplies. Products run in the format of autocast, as the plain way rounds
them; the softmax and the sums over chunks are fp32.
Shapes: N tokens, D width of the hidden states, V tokens of the vocabulary, C tokens of a chunk.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trimtab.model.forward import IGNORED

_CHUNK_BYTES = 64 * 2**20  # of a chunk's logits in fp32, and of other temporaries
_FEWEST_ROWS = 256  # below, a product waits for the weight to be read rather than computes
# fp16 has no numbers below 6e-8, where many probabilities of a large vocabulary are. A larger factor could overflow,
# and unlike the plain way nothing would lower it then: the loss scale comes only with the backward pass.
_FP16_LIFT = 16.0


@dataclass(frozen=True)
class Job:
    """What is asked of one call.

    Args:
        label_smoothing: The share of probability spread over the vocabulary.
        after: What the model does with its logits before the loss, element by element; None for nothing.
        counts_hits: Whether to count the tokens that are the most likely ones.
        at_most: An upper bound of the number of labels, known without asking the device.
        softcap: `after` as the bound of a tanh, where it is just that; for kernels that know nothing else.
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
    """The loss summed over all tokens with a label, and the number of hits (0 if not asked for), as one tensor.

    Nothing is read from an accelerator. Tokens without a label are left out on a CPU, or where `job.at_most` tells how
    many are needed at most; elsewhere they are computed and count for nothing.
    """
    apply: Callable[..., Tensor] = ChunkedCrossEntropy.apply
    return apply(hidden_ND, weight_VD, bias_V, labels_N, job, torch.is_grad_enabled())


def liger_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None, labels_N: Tensor, job: Job
) -> Tensor:
    """The same by the kernels of liger-kernel, which wait for the device once in each pass."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    positions = (labels_N != IGNORED).nonzero().squeeze(1)
    if not len(positions):  # every parameter gets a gradient of zeros, which other processes may wait for
        return chunked_cross_entropy(hidden_ND, weight_VD, bias_V, labels_N, job)
    labels_N = labels_N.index_select(0, positions)
    dtype = compute_dtype(hidden_ND)
    hidden_ND = hidden_ND.index_select(0, positions).to(dtype)
    trains = torch.is_grad_enabled() and (weight_VD.requires_grad or (bias_V is not None and bias_V.requires_grad))
    if trains and not hidden_ND.requires_grad:  # it makes no gradient of the weight otherwise
        hidden_ND = hidden_ND.detach().requires_grad_()
    with _no_autocast(hidden_ND):
        total, _, _, foretold = LigerFusedLinearCrossEntropyFunction.apply(
            hidden_ND,
            weight_VD.to(dtype),
            labels_N,
            None if bias_V is None else bias_V.to(dtype),
            None,  # weights of classes
            IGNORED,
            0.0,  # share of the squared log of the partition function
            job.label_smoothing,
            "sum",
            job.softcap,
            False,  # whether that share is given back
            torch.float32 if weight_VD.requires_grad else None,  # in which gradients of the weight are summed
            False,  # losses weighted by probability
            False,  # accuracy
            job.counts_hits,
        )
    hits = (foretold == labels_N).sum() if job.counts_hits else torch.zeros_like(total)
    return torch.stack([total.float(), hits.float()])


def logits_bytes(rows: int, length: int, vocab: int) -> int:
    """The size of all logits of a batch in fp32: what the plain way holds several times over."""
    return 4 * rows * length * vocab


def chunk_rows(num_tokens: int, vocab: int) -> int:
    """How many tokens a chunk has: as many as fit the bytes, not too few, and all chunks about alike."""
    most = max(_FEWEST_ROWS, _CHUNK_BYTES // (4 * vocab))
    num_chunks = max(1, -(-num_tokens // most))
    return max(1, -(-num_tokens // num_chunks))


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The format in which a product with `tensor` runs."""
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
        """The sum of the losses and the number of hits."""
        needs_hidden, needs_weight, needs_bias = (need and keeps_gradients for need in ctx.needs_input_grad[:3])
        dtype = compute_dtype(hidden_ND)
        positions = _labelled(labels_N, job.at_most)
        all_hidden, all_weight = hidden_ND, weight_VD
        if positions is not None:
            hidden_ND, labels_N = hidden_ND.index_select(0, positions), labels_N.index_select(0, positions)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        lift = _FP16_LIFT if dtype is torch.float16 else 1.0
        num_tokens, vocab = len(labels_N), len(weight_VD)
        losses_N = hidden_ND.new_zeros(num_tokens, dtype=torch.float32)
        hits = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden = torch.empty_like(hidden_ND) if needs_hidden else None
        grad_weight = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        grad_bias = hidden_ND.new_zeros(vocab, dtype=torch.float32) if needs_bias else None
        needs_any = needs_hidden or needs_weight or needs_bias
        with _no_autocast(hidden_ND):
            for rows in _chunks(num_tokens, vocab):
                chunk = _Chunk(functional.linear(hidden_ND[rows], weight_VD, bias), labels_N[rows], job, needs_any)
                losses_N[rows] = chunk.losses_C
                if job.counts_hits:
                    hits += chunk.num_hits()
                if not needs_any:
                    continue
                slope_CV = chunk.slope(lift)
                if grad_bias is not None:
                    grad_bias += slope_CV.sum(dim=0)
                slope_CV = slope_CV.to(dtype)
                if grad_hidden is not None:
                    torch.mm(slope_CV, weight_VD, out=grad_hidden[rows])
                if grad_weight is not None:
                    _add_product(grad_weight, slope_CV, hidden_ND[rows])
                del chunk, slope_CV  # before the next chunk is made
        ctx.kept = (grad_hidden, grad_weight, grad_bias, positions) if needs_any else None
        ctx.hidden_like = (all_hidden.shape, all_hidden.dtype)
        ctx.dtypes = (all_weight.dtype, None if bias_V is None else bias_V.dtype)
        ctx.lift = lift
        return torch.stack([losses_N.sum(), hits])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_sums: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that forward made, times that of the loss."""
        if ctx.kept is None:
            raise RuntimeError("the gradients of a chunked loss can be taken once: they are changed in place")
        (grad_hidden, grad_weight, grad_bias, positions), ctx.kept = ctx.kept, None
        factor = grad_sums[0] / ctx.lift
        if grad_hidden is not None:
            shape, dtype = ctx.hidden_like
            grad_hidden = _placed(_times(grad_hidden, factor), positions, shape, dtype)
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(factor).to(ctx.dtypes[0])
        if grad_bias is not None:
            grad_bias = grad_bias.mul_(factor).to(ctx.dtypes[1])
        return grad_hidden, grad_weight, grad_bias, None, None, None


class _Chunk:
    """The logits of some tokens, and what follows from them."""

    def __init__(self, raw_CV: Tensor, labels_C: Tensor, job: Job, needs_slope: bool) -> None:
        self._smoothing = job.label_smoothing
        self._raw_CV = raw_CV
        if job.after is None:
            self._logits_CV = raw_CV
        else:
            with torch.set_grad_enabled(needs_slope):
                self._logits_CV = job.after(raw_CV.requires_grad_(needs_slope))
        self._is_asked_C = labels_C != IGNORED
        self._labels_C = labels_C
        self._answers_C1 = labels_C.where(self._is_asked_C, 0)[:, None]
        self._log_shares_CV = functional.log_softmax(self._logits_CV.detach(), dim=-1, dtype=torch.float32)
        losses_C = -self._log_shares_CV.gather(1, self._answers_C1).squeeze(1)
        if self._smoothing:
            spread_C = -self._log_shares_CV.mean(dim=-1)
            losses_C = (1 - self._smoothing) * losses_C + self._smoothing * spread_C
        self.losses_C = losses_C.masked_fill(~self._is_asked_C, 0.0)

    def num_hits(self) -> Tensor:
        """How many of the labels are the most likely tokens."""
        return (self._logits_CV.detach().argmax(dim=-1) == self._labels_C).sum()

    def slope(self, lift: float) -> Tensor:
        """How the sum of the losses, `lift` times, changes with what the head gave; the chunk is used up by it."""
        slope_CV = self._log_shares_CV.exp_()
        vocab = slope_CV.shape[1]
        if self._smoothing:
            slope_CV -= self._smoothing / vocab
        # set and not added: adding at indices has no deterministic kernel everywhere
        slope_CV.scatter_(1, self._answers_C1, slope_CV.gather(1, self._answers_C1) - (1 - self._smoothing))
        slope_CV.masked_fill_(~self._is_asked_C[:, None], 0.0)
        if lift != 1.0:
            slope_CV *= lift
        if self._logits_CV is self._raw_CV:
            return slope_CV
        (slope_CV,) = torch.autograd.grad(self._logits_CV, self._raw_CV, slope_CV.to(self._logits_CV.dtype))
        return slope_CV


def _labelled(labels_N: Tensor, at_most: int | None) -> Tensor | None:
    """Where labels are, in order and before anything else; None for all positions."""
    if labels_N.device.type == "cpu" and at_most is None:
        positions = (labels_N != IGNORED).nonzero().squeeze(1)
        return None if len(positions) == len(labels_N) else positions
    if at_most is None or at_most >= len(labels_N):
        return None
    return (labels_N == IGNORED).to(torch.uint8).argsort(stable=True)[:at_most]


def _chunks(num_tokens: int, vocab: int) -> Iterator[slice]:
    step = chunk_rows(num_tokens, vocab)
    for start in range(0, num_tokens, step):
        yield slice(start, min(start + step, num_tokens))


def _add_product(sum_VD: Tensor, slope_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add slope^T hidden to an fp32 sum, without a temporary of its size."""
    if slope_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(slope_CV.t(), hidden_CD)
        return
    if _sums_half_in_fp32(sum_VD):
        torch.addmm(sum_VD, slope_CV.t(), hidden_CD, out_dtype=torch.float32, out=sum_VD)
        return
    # A sum of fp16 products over many tokens can overflow, which no loss scale would cure.
    dtype = torch.float32 if slope_CV.dtype in (torch.float16, torch.float64) else slope_CV.dtype
    hidden_CD = hidden_CD.to(dtype)
    num_rows = max(1, _CHUNK_BYTES // (4 * (hidden_CD.shape[1] + hidden_CD.shape[0])))
    for start in range(0, len(sum_VD), num_rows):
        part = slice(start, start + num_rows)
        sum_VD[part] += slope_CV[:, part].to(dtype).t() @ hidden_CD


def _sums_half_in_fp32(tensor: Tensor) -> bool:
    """Whether the device has products of half-precision matrices that are summed and given in fp32."""
    if tensor.device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(tensor.device) >= (8, 0)


def _times(tensor_ND: Tensor, factor: Tensor) -> Tensor:
    """The product in place, rounded once: torch would first round the factor to a half-precision tensor's format."""
    if tensor_ND.dtype == factor.dtype:
        return tensor_ND.mul_(factor)
    num_rows = max(1, _CHUNK_BYTES // (4 * max(1, tensor_ND.shape[1])))
    for part_ND in torch.split(tensor_ND, num_rows):
        part_ND.copy_(part_ND.to(factor.dtype) * factor)
    return tensor_ND


def _placed(gradient: Tensor, positions: Tensor | None, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The gradients at the positions they belong to, zeros elsewhere."""
    gradient = gradient.to(dtype)
    if positions is None:
        return gradient
    return gradient.new_zeros(shape).index_copy_(0, positions, gradient)


def _no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    kind = tensor.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()
