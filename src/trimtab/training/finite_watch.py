"""Losses and gradients that are not finite: found without holding up the device, and explained."""

from collections import deque

import torch

from trimtab.training.step import StepResult


class FiniteWatch:
    """Looks at each step's loss and gradient norm. On an accelerator one step late, so that the host need not wait.

    Args:
        device: Where the steps are computed.
        norm_counts: Whether a gradient norm that is not finite is a fault; with loss scaling it only skips a step.
    """

    def __init__(self, device: torch.device, norm_counts: bool) -> None:
        self._is_late = device.type == "cuda"
        self._norm_counts = norm_counts
        self._noted: deque[tuple[int, torch.Tensor, torch.Event | None]] = deque()

    def note(self, step: int, result: StepResult) -> None:
        """A step was taken."""
        total = result.loss_sum.detach()
        if self._norm_counts and result.grad_norm is not None:
            total = total + result.grad_norm.detach().to(total.device)  # NaN and infinity pass through
        arrived = None
        if self._is_late:
            total = torch.empty((), dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
            arrived = torch.Event("cuda")
            arrived.record()
        self._noted.append((step, total, arrived))

    def forget(self) -> None:
        """The steps noted so far were taken back."""
        self._noted.clear()

    def bad_step(self, flush: bool = False) -> int | None:
        """The first step that was not finite, as far as steps have been looked at.

        Args:
            flush: Look at the last step too, and wait for the device if need be.
        """
        keep = 1 if self._is_late and not flush else 0
        while len(self._noted) > keep:
            step, total, arrived = self._noted.popleft()
            if arrived is not None:
                arrived.synchronize()
            if not bool(torch.isfinite(total)):
                self._noted.clear()
                return step
        return None


def explanation(step: int, rows: str, has_fp16: bool, good: str) -> str:
    """What a user needs to know when a loss is not finite."""
    precision = "train.precision: bf16 or fp32" if has_fp16 else "train.max_grad_norm: 1.0, or fewer large values"
    return (
        f"the loss or the gradients of step {step} are not finite. The rows of that step are in {rows}\n"
        "  likely causes, and what to try:\n"
        "  1. the learning rate is too high, or rises too fast: train.lr, train.warmup\n"
        f"  2. numbers too large for the precision: {precision}\n"
        "  3. rows that cannot be learnt from (empty, broken, without labels): look at that file; "
        "train.on_nan: skip leaves such steps out\n"
        f"  {good}"
    )
