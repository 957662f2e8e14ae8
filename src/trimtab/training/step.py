"""One optimizer step: forward and backward of each micro-batch, clipping, and the step itself.

Nothing is read from the device, unless steps that are not finite have to be skipped.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from trimtab.data.packing import count_tokens
from trimtab.engine.engine import Engine
from trimtab.model.captured_micro_batch import Compute
from trimtab.model.captured_step import compute_plainly
from trimtab.model.losses import Loss
from trimtab.optim.host_update import optimized
from trimtab.optim.in_backward import updates_of


@dataclass(frozen=True)
class StepResult:
    """The sums of one step in this process. Tensors stay on the device."""

    loss_sum: torch.Tensor
    weight: torch.Tensor | float
    grad_norm: torch.Tensor | None
    num_tokens: torch.Tensor | int  # without padding tokens
    was_skipped: bool = False  # the gradients are not finite, so the weights do not change


def window_gradients(
    engine: Engine,
    model: torch.nn.Module,
    loss: Loss,
    micro_batches: Iterable[dict[str, torch.Tensor]],
    num_micro_batches: int,
    max_grad_norm: float | None,
    skips_nonfinite: bool = False,
    compute: Compute = compute_plainly,
) -> StepResult:
    """Accumulate the gradients of one batch in `.grad`, clipped.

    Weights, optimizer and schedule do not change, so `Rollback` can undo it, unless weights are updated in backward
    (`trimtab.optim.in_backward`).

    Micro-batches are read one at a time. None may be read ahead, because the engine ends a window with the loader's
    last batch; and the device needs to hold only one.

    Args:
        engine: The engine that prepared `model`.
        model: The prepared model.
        loss: Computes the loss of a micro-batch.
        micro_batches: The micro-batches of the batch.
        num_micro_batches: How many there are.
        max_grad_norm: The norm to clip to; None does not clip.
        skips_nonfinite: Whether to mark the result as skipped if the gradients are not finite. This needs a host-device
            sync.
        compute: Computes a micro-batch.
    """
    engine.gradient_accumulation_steps = num_micro_batches
    updates = updates_of(model)
    updates.begin_window(num_micro_batches, max_grad_norm)
    losses, weights, norm = [], [], None
    num_tokens: torch.Tensor | int = 0
    for batch in micro_batches:
        with engine.accumulate(model):
            loss_sum, weight = compute(engine, model, loss, batch)
        if engine.has_no_rows:
            continue
        losses.append(loss_sum)
        weights.append(weight)
        num_tokens = num_tokens + count_tokens(batch)
    if updates.is_updating:
        norm = updates.finish_window()
    elif (max_grad_norm or skips_nonfinite) and engine.sync_gradients:
        norm = updates.clip(max_grad_norm or math.inf)
        if norm is None:
            parameters = [parameter for parameter in _parameters_of(model) if parameter.grad is not None]
            norm = engine.clip_grad_norm_(parameters, max_grad_norm or math.inf)
    loss_sum = torch.stack(losses).sum() if losses else torch.zeros((), device=engine.device)
    if skips_nonfinite and norm is not None and not bool(torch.isfinite(norm)):
        return StepResult(torch.zeros_like(loss_sum), 0.0, None, num_tokens, was_skipped=True)
    return StepResult(loss_sum, sum(weights), norm, num_tokens)


_known: WeakKeyDictionary[torch.nn.Module, list[torch.Tensor]] = WeakKeyDictionary()


def _parameters_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """The parameters of a model, or the tensors that hold their gradients on the host.

    They are collected once: walking over a BERT's modules takes a millisecond of every step.
    """
    if model not in _known:
        _known[model] = [optimized(parameter) for parameter in model.parameters()]
    return _known[model]


def take_step(optimizer: Any, scheduler: Any, result: StepResult) -> None:
    """Step the optimizer and the schedule, unless the step is skipped, and reset the gradients.

    This cannot be rolled back: if the optimizer fails, it may have changed some of the weights.
    """
    if not result.was_skipped:
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
