"""The contents of `.grad` after each backward: final gradients as soon as a window may end.

Final means without the loss scale and normalized by the weight of the whole window. A loop can therefore clip, print or
change gradients with plain torch, in any precision and with any accumulation. If another backward follows without a
step, the gradients are first brought back to the scale of the window.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.accumulation import Accumulation, Weight
from trimtab.engine.agreement import Agreement
from trimtab.engine.loss_scaler import NO_OWNER, Scaler
from trimtab.errors import LossError
from trimtab.model.captured_micro_batch import CapturedMicroBatch
from trimtab.model.precision import convert_to_fp32


class Gradients:
    """The gradients of all prepared models and optimizers.

    Args:
        accumulation: The current window.
        scaler: The loss scaler, or the one that does nothing.
        world: The processes whose gradients are averaged.
    """

    def __init__(self, accumulation: Accumulation, scaler: Scaler, world: World | None = None) -> None:
        self._accumulation = accumulation
        self._scaler = scaler
        self._world: World = world or World()
        self.connected: list[DataParallel] = []  # models whose gradients are exchanged between processes
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._are_final = False
        self._applied: Weight | None = None  # the correction that the final gradients contain
        self._window = 0
        # ids of optimizers that have already stepped in this window and used their gradients
        self._stepped: set[int] = set()
        self.num_skipped = 0  # steps skipped because of an overflow, over all optimizers
        self.last_norm: torch.Tensor | None = None  # the gradient norm of the last window that was clipped
        self.agreement = Agreement(self._world, self.connected, accumulation)

    def watch(self, part: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Manage the gradients of a model or an optimizer from now on."""
        known: list[Any] = self._models if isinstance(part, torch.nn.Module) else self._optimizers
        if not any(part is other for other in known):
            known.append(part)
            if isinstance(part, DataParallel):
                self.connected.append(part)

    def forget(self) -> None:
        """Drop all references to models and optimizers."""
        self._scaler.forget()
        self._are_final, self._applied = False, None
        self._models.clear()
        self._optimizers.clear()
        self.connected.clear()

    @property
    def are_same_everywhere(self) -> bool:
        """Whether every process has exchanged all its gradients for the next step."""
        if self._accumulation.is_waiting_for_step and any(model.has_unsynced_gradients for model in self.connected):
            return False
        return self._accumulation.sync

    @property
    def is_scaling(self) -> bool:
        """Whether losses are scaled, as for fp16."""
        return self._scaler.is_scaling

    def backward(self, loss: torch.Tensor, weight: Weight | None, row_share: float = 1.0, **kwargs: Any) -> None:
        """Accumulate the contribution of `loss`; at the end of a window, make the gradients final."""
        accumulation = self._accumulation
        in_plain_loop = not accumulation.belongs_to_micro_batch()
        if in_plain_loop:
            accumulation.open_plain(row_share)
        self._open()
        self.agreement.before_backward(weight)
        contribution = accumulation.contribution(loss, weight)
        if self.connected and accumulation.exchanges:
            self._backward_with_exchange(contribution, loss, **kwargs)
        elif contribution is not None:
            self._scaler.scale(contribution).backward(**kwargs)  # type: ignore[no-untyped-call]
        if accumulation.sync:
            self._finalize(accumulation.correction(in_plain_loop, loss.device))

    def replay(self, captured: CapturedMicroBatch) -> None:
        """Accumulate the contribution of a captured micro-batch, like `backward`; for one process only."""
        accumulation = self._accumulation
        in_plain_loop = not accumulation.belongs_to_micro_batch()
        if in_plain_loop:
            accumulation.open_plain()
        self._open()
        captured.run(accumulation.open_replay(captured.usual_weight), self._scaler.factor())
        accumulation.count_replay(captured.weight)
        if accumulation.sync:
            self._finalize(accumulation.correction(in_plain_loop, captured.device))

    def _open(self) -> None:
        """Prepare `.grad` for another backward, which may be the first of a window."""
        begins = self._window != self._accumulation.window
        if begins:
            self._scaler.begin_window()
        self._reopen()
        if begins:
            self._window = self._accumulation.window
            self._stepped.clear()

    def _backward_with_exchange(self, contribution: torch.Tensor | None, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward in which processes exchange gradients; a process without a contribution sends zeros."""
        with self._world.exchanging("backward"):
            if contribution is not None:
                self._scaler.scale(contribution).backward(**kwargs)  # type: ignore[no-untyped-call]
            else:
                for model in self.connected:
                    model.contribute_zero_gradients(loss)
        self.agreement.after_exchange()
        for model in self.connected:
            model.check_after_backward(loss, self.connected)

    def _finalize(self, correction: Weight | None) -> None:
        self._are_final, self._applied = True, correction
        if correction is None and not self._scaler.is_scaling:
            return
        for owner, parameters in self._by_owner():
            if self._scaler.is_scaling:
                convert_to_fp32(parameters)  # parameters that became trainable after `prepare` may still be fp16
            gradients = _gradients_of(parameters)
            if gradients:
                self._scaler.unscale(owner, gradients)
                if owner not in self._stepped:
                    _multiply(gradients, correction)

    def _reopen(self) -> None:
        """Bring final gradients back to the scale of the window, because another backward adds to them."""
        if not self._are_final:
            return
        self._are_final = False
        correction, self._applied = self._applied, None
        if not self._scaler.is_scaling and correction is None:
            return
        for owner, parameters in self._by_owner():
            gradients = _gradients_of(parameters)
            if gradients:
                self._scaler.rescale(gradients)
                if correction is not None and owner not in self._stepped:
                    _multiply(gradients, 1.0 / correction)

    def overflowed(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the step of `optimizer` must be skipped. In fp16 this is a host-device sync."""
        overflowed = self._scaler.overflowed(id(optimizer), self._world)
        self.num_skipped += overflowed
        self._scaler.finish_step(id(optimizer), overflowed)
        self._accumulation.step_taken()
        self._stepped.add(id(optimizer))
        return overflowed

    def discarded(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that `optimizer` zeroed its gradients: overflow flags are cleared, and a plain loop's window ends."""
        self._scaler.set_flags(id(optimizer), [])
        if self._accumulation.is_open_in_plain_loop and not any(held for _, held in self._by_owner()):
            self._accumulation.step_taken()

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two backwards of one step, and the number of skipped steps."""
        return {
            "are_true": self._are_final,
            "applied": self._applied,
            "num_skipped": self.num_skipped,
            "overflows": [self._scaler.flags_of(id(optimizer)) for optimizer in self._optimizers],
            "stepped": [id(optimizer) in self._stepped for optimizer in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self._are_final, self._applied = state["are_true"], state["applied"]
        self.num_skipped = state["num_skipped"]
        for optimizer, flags in zip(self._optimizers, state["overflows"], strict=True):
            self._scaler.set_flags(id(optimizer), flags)
        has_stepped = state.get("stepped", [False] * len(self._optimizers))  # absent in older checkpoints
        self._stepped = {id(o) for o, stepped in zip(self._optimizers, has_stepped, strict=True) if stepped}
        self._window = self._accumulation.window  # the loaded window replaces the open one

    def window_undo_point(self) -> Callable[[], None]:
        """Return a function that undoes what a window has done to the gradients; see `Engine.undo_point`.

        Not named `undo_point`: `StatefulPart` looks for a method of that name, which undoes `load_state_dict`.
        """
        accumulation, before = self._accumulation.state_dict(), self.state_dict()
        num_steps, norm = self._accumulation.num_steps, self.last_norm

        def undo() -> None:
            for model in self._models:
                model.zero_grad(set_to_none=True)
            for optimizer in self._optimizers:  # an optimizer may hold master copies of the parameters
                optimizer.zero_grad(set_to_none=True)
            self._accumulation.load_state_dict(accumulation)
            self.load_state_dict(before)
            self._accumulation.num_steps, self.last_norm = num_steps, norm

        return undo

    def abandon_window(self) -> None:
        """Drop an open window and its gradients: the loop will repeat its batches."""
        if self._accumulation.sync and not self._accumulation.is_waiting_for_step:
            return
        self._accumulation.abandon_window()
        self._are_final, self._applied = False, None
        for _, parameters in self._by_owner():
            for parameter in parameters:
                parameter.grad = None

    @contextmanager
    def window_set_aside(self) -> Iterator[None]:
        """Hide an open window and its gradients inside the context, and restore them on exit."""
        accumulation = self._accumulation
        if accumulation.sync and not accumulation.is_waiting_for_step:
            yield
            return
        held = [(parameter, parameter.grad) for _, parameters in self._by_owner() for parameter in parameters]
        reopen, before, window = accumulation.undo_point(), self.state_dict(), self._window
        self.abandon_window()
        try:
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
            reopen()
            self.load_state_dict(before)
            self._window = window

    def _by_owner(self) -> Iterator[tuple[int, list[torch.nn.Parameter]]]:
        """Yield every parameter with a gradient once, grouped by the optimizer that holds it."""
        seen: set[int] = set()
        for optimizer in self._optimizers:
            held = (p for group in optimizer.param_groups for p in group["params"])
            yield id(optimizer), _not_seen(held, seen)
        yield NO_OWNER, _not_seen((p for model in self._models for p in model.parameters()), seen)


def checked_loss(loss: Any) -> torch.Tensor:
    """Return a loss of one element as a scalar; raise `LossError` for a value that cannot be differentiated."""
    if loss is None:
        raise LossError("the loss is None: the model got no labels", 'put "labels" into the batch')
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"the loss is a {type(loss).__name__}, not a tensor", "pass the loss tensor of the model")
    if loss.numel() != 1:
        raise LossError(f"the loss has shape {tuple(loss.shape)}, but must be a scalar", "loss.mean()")
    if not loss.requires_grad:
        raise LossError(
            "the loss does not depend on any trainable parameter",
            "check requires_grad of the parameters, and that the forward is not under torch.no_grad()",
        )
    return loss.reshape(())


def _not_seen(parameters: Iterator[torch.nn.Parameter], seen: set[int]) -> list[torch.nn.Parameter]:
    fresh = []
    for parameter in parameters:
        if parameter.grad is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            fresh.append(parameter)
    return fresh


def _gradients_of(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in parameters]
    return [g._values() if g.is_sparse else g for g in gradients if g is not None]


def _multiply(gradients: list[torch.Tensor], factor: Weight | None) -> None:
    """Multiply in place; products of bf16 gradients are computed in fp32 and rounded once."""
    if factor is None:
        return
    if gradients and isinstance(factor, torch.Tensor) and factor.device != gradients[0].device:
        # gradients on the host, where the host waits for the device in any case
        factor = factor.to(gradients[0].device)
    one_by_one = [gradient for gradient in gradients if _foreach_rounds(factor, gradient)]
    for gradient in one_by_one:
        gradient.mul_(_as_operand(factor, gradient))
    if one_by_one:
        gradients = [gradient for gradient in gradients if not _foreach_rounds(factor, gradient)]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _foreach_rounds(factor: Weight, gradient: torch.Tensor) -> bool:
    """Return whether `_foreach_mul_` rounds the factor to the dtype of the gradient before it multiplies.

    On the CPU it does so for a Python number, on accelerators for a 0-dim tensor.
    """
    if gradient.dtype in (torch.float32, torch.float64):
        return False
    return isinstance(factor, torch.Tensor) or gradient.device.type == "cpu"


def _as_operand(factor: Weight, gradient: torch.Tensor) -> Weight:
    """Return the factor in a form that `mul_` does not round: a number, or a tensor that takes part in promotion."""
    if not isinstance(factor, torch.Tensor):
        return factor
    return factor.to(gradient.device, non_blocking=True).reshape((1,) * min(gradient.dim(), 1))
