"""One optimizer step: the micro-batches of a window, through the engine's verbs, without a read from the device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.engine import Engine
from trimtab.model.losses import Loss


@dataclass(frozen=True)
class StepResult:
    """What one step did; tensors stay on the device until somebody looks."""

    loss_sum: torch.Tensor
    weight: torch.Tensor | float
    grad_norm: torch.Tensor | None
    num_tokens: torch.Tensor | int  # without padding


def train_step(
    engine: Engine,
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any,
    loss: Loss,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    num_micro_batches: int,
    max_grad_norm: float | None,
) -> StepResult:
    """Forward and backward over the micro-batches of one batch, then one step of optimizer and schedule.

    Micro-batches are taken from their loader one at a time: the engine ends a window with the loader's last batch, so
    none may be read ahead; nor has a device to hold more than one.
    """
    engine.gradient_accumulation_steps = num_micro_batches
    losses, weights, norm = [], [], None
    num_tokens: torch.Tensor | int = 0
    for batch in micro_batches:
        with engine.accumulate(model):
            step = loss(model, batch)
            engine.backward(step.value, weight=step.weight)
            if max_grad_norm and engine.sync_gradients:
                norm = engine.clip_grad_norm_(trainable(model), max_grad_norm)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(step.loss_sum())
        weights.append(step.weight)
        num_tokens = num_tokens + (
            batch["attention_mask"].sum() if "attention_mask" in batch else batch["input_ids"].numel()
        )
    return StepResult(torch.stack(losses).sum(), sum(weights), norm, num_tokens)


def trainable(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that have a gradient to clip."""
    return [p for p in model.parameters() if p.grad is not None]
