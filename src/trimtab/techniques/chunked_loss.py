"""The loss of language models with less memory: from hidden states in chunks, or from logits with fused kernels.

The arithmetic is in `trimtab.model.chunked_loss`, `trimtab.model.linear_cross_entropy` and
`trimtab.model.token_cross_entropy`.
"""

from collections.abc import Iterator

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.extras import has_package
from trimtab.log import say
from trimtab.model import linear_cross_entropy, token_cross_entropy
from trimtab.model.chunked_loss import HeadLoss, require_liger
from trimtab.model.linear_cross_entropy import logits_bytes
from trimtab.model.losses import FusedTokenLoss, Loss, LossWithoutLogits, build_loss
from trimtab.techniques.base import (
    Accelerator,
    Case,
    LossRequest,
    Patch,
    Technique,
    TraceRecorder,
)

SMALL_LOGITS_BYTES = 128 * 2**20  # smaller logits are not worth chunking


class ChunkedLoss(Technique):
    """Compute the cross-entropy of tokens without a tensor of all logits, or without copies of it."""

    key = "loss"
    setting = "memory.loss"
    off = "plain"
    may_fail_in_trace = True
    needs_prediction = True
    advice = "chunked"

    def values(self, case: Case) -> tuple[str, ...]:
        """Include chunks if logits are large and the head is a single matrix product.

        Which value is faster depends on the device: chunks are faster on some GPUs, and slow on old GPUs in fp16.
        """
        asked = str(self.asked(case.recipe))
        if case.loss_kind != "token-cross-entropy" or case.has_own_loss:
            if asked not in ("auto", "plain"):
                is_own = case.has_own_loss
                why = "a custom loss needs the logits" if is_own else f"a {case.loss_kind} loss has few logits"
                raise RecipeError(f"memory.loss: {asked}: {why}", "memory.loss: plain, or remove the key")
            return ("plain",)
        if asked == "auto":
            return ("plain",) if self._is_small(case) else self._values_for_auto(case)
        if asked == "liger" and case.accelerator.is_here:
            require_liger()
        problem = None if asked == "plain" else self._problem(asked, case)
        if problem is not None:
            raise RecipeError(f"memory.loss: {asked}: {problem}", "memory.loss: plain")
        return (asked,)

    def _values_for_auto(self, case: Case) -> tuple[str, ...]:
        whole = "plain" if self._problem("fused", case) else "fused"
        return (whole,) if self._problem("chunked", case) else (whole, "chunked")

    def without_plan(self, case: Case) -> str:
        """Choose chunks if possible: they cost little time and save much memory."""
        values = self.values(case)
        if values == ("plain",) and self.asked(case.recipe) == "auto" and not self._is_small(case):
            problem = self._problem("chunked", case)
            if problem is not None:
                say(f"memory.loss: plain, because {problem}")
        return values[-1]

    def _is_small(self, case: Case) -> bool:
        if case.loss_kind != "token-cross-entropy":
            return True
        head = case.model.get_output_embeddings()
        return head is None or logits_bytes(case.num_rows, case.num_targets, len(head.weight)) < SMALL_LOGITS_BYTES

    def _problem(self, how: str, case: Case) -> str | None:
        if how == "fused":
            return _kernel_problem(case.accelerator)
        return None if case.find_head_problem is None else case.find_head_problem(how)

    def change_loss(self, loss: Loss, value: str, request: LossRequest) -> Loss:
        """Return the same loss without logits, or without copies of them."""
        if value == "plain":
            return loss
        settings = {name: given for name, given in vars(request).items() if name != "class_weights"}  # of tokens: none
        return build_task_loss(**settings, how=value)

    def patches(self, recorder: TraceRecorder, accelerator: Accelerator) -> Iterator[Patch]:
        """Trace three of the equal chunks, and count the operations of the second for all others."""
        all_slices = linear_cross_entropy._slices

        def few_slices(num_tokens: int, size: int) -> Iterator[slice]:
            chunks = list(all_slices(num_tokens, size))
            for number, chunk in enumerate(chunks[:2]):
                first_op = len(recorder.ops)
                yield chunk
                if number == 1 and len(chunks) > 3:
                    recorder.ops += recorder.ops[first_op:] * (len(chunks) - 3)
            yield from chunks[2:3] if len(chunks) == 3 else chunks[-1:] if len(chunks) > 3 else ()

        sums_in_fp32 = accelerator.capability is not None and accelerator.capability >= (8, 0)
        yield linear_cross_entropy, "_sums_half_in_fp32", lambda _: sums_in_fp32
        yield linear_cross_entropy, "_slices", few_slices
        kernels = _TracedKernels(recorder) if _kernel_problem(accelerator) is None else None
        yield token_cross_entropy, "kernels_for", lambda _: kernels

    def tries_loss_first(self, value: str) -> bool:
        """Return True for the chunked loss, which runs the model once to find out what it does after its head."""
        return value not in ("plain", "fused")

    def loads_kernels(self, value: str) -> bool:
        """Return True for the fused kernels, which are Triton's; the two that chunks use on some GPUs are too small."""
        return value == "fused"


def _kernel_problem(accelerator: Accelerator) -> str | None:
    """The reason why a device cannot run the fused kernels; None if it can."""
    if not accelerator.is_cuda:
        return f"its kernels need an NVIDIA GPU; this device is {accelerator.type}"
    if accelerator.capability is not None and accelerator.capability < token_cross_entropy.MIN_CAPABILITY:
        least = ".".join(map(str, token_cross_entropy.MIN_CAPABILITY))
        return f"its kernels need an NVIDIA GPU of compute capability {least} or higher"
    if accelerator.is_here and not has_package("triton"):
        return "its kernels need Triton, which is not installed"
    return None


class _TracedKernels:
    """Allocate what `trimtab.model.cross_entropy_kernel` allocates, and count what it reads and writes."""

    def __init__(self, recorder: TraceRecorder) -> None:
        self._recorder = recorder

    def token_losses(
        self, logits_NV: torch.Tensor, labels_N: torch.Tensor, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = ((len(labels_N),), (len(labels_N), 2))
        losses_N, norms_N2 = (torch.empty(shape, dtype=torch.float32, device=labels_N.device) for shape in shapes)
        self._recorder.note("cross_entropy", [logits_NV, labels_N, losses_N, norms_N2])
        return losses_N, norms_N2

    def write_gradient(
        self,
        logits_NV: torch.Tensor,
        labels_N: torch.Tensor,
        norms_N2: torch.Tensor,
        smoothing: float,
        factors: torch.Tensor | float,
        gradient_NV: torch.Tensor,
    ) -> None:
        self._recorder.note("cross_entropy_backward", [logits_NV, labels_N, norms_N2, gradient_NV])


def build_task_loss(
    kind: str,
    *,
    shifts_labels: bool = False,
    label_smoothing: float = 0.0,
    counts_hits: bool = False,
    how: str = "plain",
) -> Loss:
    """The loss of a task, with or without a tensor of all logits or copies of it.

    Args:
        kind: This and the next two arguments are as in `trimtab.model.losses.build_loss`.
        shifts_labels: Whether the logits at position t predict the label at t + 1.
        label_smoothing: As in `torch.nn.CrossEntropyLoss`.
        counts_hits: Whether to count labels that are the most likely token, for the metric token_accuracy, if there are
            no logits.
        how: "plain" computes all logits; "chunked" and "liger" (on a GPU) do not; "fused" (on a GPU) does not copy
            them. All except "plain" support only "token-cross-entropy".
    """
    if how not in ("plain", "fused", "chunked", "liger"):
        raise RecipeError(f"memory.loss: {how!r} is not valid", "memory.loss: plain, fused, chunked or liger")
    loss = build_loss(kind, shifts_labels=shifts_labels, label_smoothing=label_smoothing)
    if how == "plain":
        return loss
    if kind != "token-cross-entropy":
        raise RecipeError(f"memory.loss: {how} does not support a {kind} loss", "memory.loss: plain, or auto")
    if how == "fused":
        return FusedTokenLoss(label_smoothing, shifts_labels)
    return LossWithoutLogits(HeadLoss(how, label_smoothing, counts_hits=counts_hits), shifts_labels)
