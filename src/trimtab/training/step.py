"""One optimizer step: the micro-batches of a window, through the engine's verbs, without a read from the device."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.engine.engine import Engine
from trimtab.model.losses import Loss


@dataclass(frozen=True)
class StepResult:
    """What one step did in this process; tensors stay on the device until somebody looks."""

    loss_sum: torch.Tensor
    weight: torch.Tensor | float
    grad_norm: torch.Tensor | None
    num_tokens: torch.Tensor | int  # without padding
    was_left_out: bool = False  # not finite, and so no step


def window_gradients(
    engine: Engine,
    model: torch.nn.Module,
    loss: Loss,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    num_micro_batches: int,
    max_grad_norm: float | None,
    leaves_out_nonfinite: bool = False,
) -> StepResult:
    """Forward and backward over the micro-batches of one batch; its gradients, clipped, stand in the parameters then.

    Weights, optimizer and schedule are as they were, so that all of it can be taken back: see `Transaction`.

    Micro-batches are taken from their loader one at a time: the engine ends a window with the loader's last batch, so
    none may be read ahead; nor has a device to hold more than one.

    With `leaves_out_nonfinite` the result says so where gradients are not finite. To know that, the host waits for the
    device.
    """
    engine.gradient_accumulation_steps = num_micro_batches
    losses, weights, norm = [], [], None
    num_tokens: torch.Tensor | int = 0
    for batch in micro_batches:
        with engine.accumulate(model):
            step = loss(model, batch)
            engine.backward(step.value, weight=step.weight)
        if engine.has_no_rows:
            continue
        losses.append(step.loss_sum())
        weights.append(step.weight)
        num_tokens = num_tokens + (
            batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        )
        del step  # else its logits would be there through the next forward
    if (max_grad_norm or leaves_out_nonfinite) and engine.sync_gradients:
        norm = engine.clip_grad_norm_(trainable(model), max_grad_norm or math.inf)
    loss_sum = torch.stack(losses).sum() if losses else torch.zeros((), device=engine.device)
    if leaves_out_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
        return StepResult(torch.zeros_like(loss_sum), 0.0, None, num_tokens, was_left_out=True)
    return StepResult(loss_sum, sum(weights), norm, num_tokens)


def take_step(optimizer: Any, scheduler: Any, result: StepResult) -> None:
    """One step of optimizer and schedule with the gradients of a window, unless it is to be left out.

    From here on there is no way back: an optimizer that fails half-way has changed some of the weights.
    """
    if not result.was_left_out:
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient to clip."""
    return [p for p in model.parameters() if p.grad is not None]
