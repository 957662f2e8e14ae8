"""Detect losses and gradients that are not finite without a host-device sync per step, and explain them."""

from collections import deque

import torch

from trimtab.training.step import StepResult


class FiniteWatch:
    """Check the loss and gradient norm of each step; on CUDA one step late, so the host never waits for the device.

    Args:
        device: Where the steps are computed.
        norm_counts: Whether a gradient norm that is not finite is an error; with loss scaling it only skips a step.
    """

    def __init__(self, device: torch.device, norm_counts: bool) -> None:
        self._is_late = device.type == "cuda"
        self._norm_counts = norm_counts
        self._pending: deque[tuple[int, torch.Tensor, torch.Event | None]] = deque()

    def note(self, step: int, result: StepResult) -> None:
        """Queue the result of a step."""
        total = result.loss_sum.detach()
        if self._norm_counts and result.grad_norm is not None:
            total = total + result.grad_norm.detach().to(total.device)  # NaN and infinity propagate through the sum
        arrived = None
        if self._is_late:
            total = torch.empty((), dtype=total.dtype, pin_memory=True).copy_(total, non_blocking=True)
            arrived = torch.Event("cuda")
            arrived.record()
        self._pending.append((step, total, arrived))

    def forget(self) -> None:
        """Drop the results of steps that were undone."""
        self._pending.clear()

    def bad_step(self, flush: bool = False) -> int | None:
        """Return the first step that is not finite among those whose results have arrived.

        Args:
            flush: Include the last step, which may be a host-device sync.
        """
        num_left = 1 if self._is_late and not flush else 0
        while len(self._pending) > num_left:
            step, total, arrived = self._pending.popleft()
            if arrived is not None:
                arrived.synchronize()
            if not bool(torch.isfinite(total)):
                self._pending.clear()
                return step
        return None


def explain_nonfinite(step: int, rows: str, has_fp16: bool, good: str) -> str:
    """Explain to the user why a loss may not be finite; `rows` is a file, `good` describes the last good checkpoint."""
    precision = (
        "train.precision: bf16 or fp32" if has_fp16 else "train.max_grad_norm: 1.0, or smaller values in the data"
    )
    return (
        f"the loss or the gradients of step {step} are not finite. The rows of that step are in {rows}\n"
        "  likely causes and fixes:\n"
        "  1. the learning rate is too high or rises too fast: train.lr, train.warmup\n"
        f"  2. values too large for the precision: {precision}\n"
        "  3. rows that cannot be learned from (empty, broken, without labels): look at that file; "
        "train.on_nan: skip skips such steps\n"
        f"  {good}"
    )
