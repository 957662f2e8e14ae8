"""What stands in `.grad` after each backward: as soon as a window may end, the true gradients.

A loop can therefore clip, print or change gradients with plain torch, whatever the precision and however the batch was
cut. Should another backward follow without a step, the gradients are brought back to the scale of the window first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import SoloWorld, World
from trimtab.engine.accumulation import Accumulation, Weight
from trimtab.engine.agreement import Agreement
from trimtab.engine.loss_scaler import NO_OWNER, Scaler
from trimtab.model.precision import keep_fp32


class Gradients:
    """The gradients of everything that was prepared.

    Args:
        accumulation: The current window.
        scaler: Loss scaling, or the scaler that does nothing.
        world: The processes whose gradients are averaged.
    """

    def __init__(self, accumulation: Accumulation, scaler: Scaler, world: World | None = None) -> None:
        self._accumulation = accumulation
        self._scaler = scaler
        self._world: World = world or SoloWorld()
        self._connected: list[DataParallel] = []
        self._models: list[torch.nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._are_true = False
        self._applied: Weight | None = None  # the correction that the true gradients contain
        self._window = 0
        self._stepped: set[int] = set()  # optimizers that have stepped in this window: their gradients are used up
        self.num_skipped = 0  # steps whose gradients had overflowed, over all optimizers
        self.agreement = Agreement(self._world, self._connected, accumulation)

    def watch(self, part: torch.nn.Module | torch.optim.Optimizer) -> None:
        """Take the parameters of a model or an optimizer under care."""
        known: list[Any] = self._models if isinstance(part, torch.nn.Module) else self._optimizers
        if not any(part is other for other in known):
            known.append(part)
            if isinstance(part, DataParallel):
                self._connected.append(part)

    def forget(self) -> None:
        """Hold on to nothing."""
        self._scaler.forget()
        self._are_true, self._applied = False, None
        self._models.clear()
        self._optimizers.clear()
        self._connected.clear()

    @property
    def connected(self) -> list[DataParallel]:
        """The models whose gradients are exchanged between processes."""
        return self._connected

    @property
    def are_same_everywhere(self) -> bool:
        """Whether no process holds gradients for the next step that it has not exchanged with the others."""
        if self._accumulation.is_waiting_for_step and any(model.has_own_gradients for model in self._connected):
            return False
        return self._accumulation.sync

    def backward(self, loss: torch.Tensor, weight: Weight | None, row_share: float = 1.0, **kwargs: Any) -> None:
        """Add what `loss` contributes; at the end of a window, make the gradients true."""
        accumulation = self._accumulation
        in_plain_loop = not accumulation.belongs_to_micro_batch()
        if in_plain_loop:
            accumulation.open_plain(row_share)
        begins = self._window != accumulation.window
        if begins:
            self._scaler.begin_window()
        self._reopen()
        if begins:
            self._window = accumulation.window
            self._stepped.clear()
        self.agreement.before_backward(weight)
        contribution = accumulation.share(loss, weight)
        if self._connected and accumulation.exchanges:
            self._backward_with_others(contribution, loss, **kwargs)
        elif contribution is not None:
            self._scaler.scale(contribution).backward(**kwargs)  # type: ignore[no-untyped-call]
        if accumulation.sync:
            self._make_true(accumulation.correction(in_plain_loop, loss.device))

    def _backward_with_others(self, contribution: torch.Tensor | None, loss: torch.Tensor, **kwargs: Any) -> None:
        """The backward in which processes exchange gradients: one that has nothing to give answers all the same."""
        with self._world.exchanging("backward"):
            if contribution is not None:
                self._scaler.scale(contribution).backward(**kwargs)  # type: ignore[no-untyped-call]
            else:
                for model in self._connected:
                    model.answer_with_nothing(loss)
        self.agreement.after_exchange()
        for model in self._connected:
            model.backward_done(loss, self._connected)

    @property
    def is_scaling(self) -> bool:
        """Whether losses are scaled, as fp16 needs it."""
        return self._scaler.is_scaling

    def _make_true(self, correction: Weight | None) -> None:
        self._are_true, self._applied = True, correction
        if correction is None and not self._scaler.is_scaling:
            return
        for owner, parameters in self._by_owner():
            if self._scaler.is_scaling:
                keep_fp32(parameters)  # parameters that began to train after prepare
            gradients = _gradients_of(parameters)
            if gradients:
                self._scaler.unscale(owner, gradients)
                if owner not in self._stepped:
                    _multiply(gradients, correction)

    def _reopen(self) -> None:
        """Another backward follows: bring gradients that were kept back to the scale in which it will add to them."""
        if not self._are_true:
            return
        self._are_true = False
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
        """Whether the step of `optimizer` has to be skipped. In fp16 this reads one flag from the device."""
        overflowed = self._scaler.overflowed(id(optimizer), self._world)
        self.num_skipped += overflowed
        self._scaler.finish_step(id(optimizer), overflowed)
        self._accumulation.step_taken()
        self._stepped.add(id(optimizer))
        return overflowed

    def discarded(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of `optimizer` were thrown away: what was noted of them is void, and a plain window over."""
        self._scaler.set_flags(id(optimizer), [])
        if self._accumulation.is_open_in_plain_loop and not any(held for _, held in self._by_owner()):
            self._accumulation.step_taken()

    def state_dict(self) -> dict[str, Any]:
        """What `.grad` holds between two backwards of one step, and the count of skipped steps."""
        return {
            "are_true": self._are_true,
            "applied": self._applied,
            "num_skipped": self.num_skipped,
            "overflows": [self._scaler.flags_of(id(optimizer)) for optimizer in self._optimizers],
            "stepped": [id(optimizer) in self._stepped for optimizer in self._optimizers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._are_true, self._applied = state["are_true"], state["applied"]
        self.num_skipped = state["num_skipped"]
        for optimizer, flags in zip(self._optimizers, state["overflows"], strict=True):
            self._scaler.set_flags(id(optimizer), flags)
        has_stepped = state.get("stepped", [False] * len(self._optimizers))
        self._stepped = {id(o) for o, stepped in zip(self._optimizers, has_stepped, strict=True) if stepped}
        self._window = self._accumulation.window  # the window that was loaded is the one that is open

    @contextmanager
    def window_set_aside(self) -> Iterator[None]:
        """Inside, an open window has not begun, and no gradient waits for a step; afterwards all is as before."""
        accumulation = self._accumulation
        if accumulation.sync and not accumulation.is_waiting_for_step:
            yield
            return
        held = [(parameter, parameter.grad) for _, parameters in self._by_owner() for parameter in parameters]
        reopen, before, window = accumulation.undo_point(), self.state_dict(), self._window
        accumulation.abandon_window()
        self._are_true, self._applied = False, None
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for parameter, gradient in held:
                parameter.grad = gradient
            reopen()
            self.load_state_dict(before)
            self._window = window

    def _by_owner(self) -> Iterator[tuple[int, list[torch.nn.Parameter]]]:
        """Each parameter once, with the optimizer that holds it."""
        seen: set[int] = set()
        for optimizer in self._optimizers:
            held = (p for group in optimizer.param_groups for p in group["params"])
            yield id(optimizer), _not_seen(held, seen)
        yield NO_OWNER, _not_seen((p for model in self._models for p in model.parameters()), seen)


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
    """Multiply in place. A product of a bf16 gradient and the factor is computed in fp32 and rounded once."""
    if factor is None:
        return
    one_by_one = [gradient for gradient in gradients if _foreach_rounds(factor, gradient)]
    for gradient in one_by_one:
        gradient.mul_(_as_operand(factor, gradient))
    if one_by_one:
        gradients = [gradient for gradient in gradients if not _foreach_rounds(factor, gradient)]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def _foreach_rounds(factor: Weight, gradient: torch.Tensor) -> bool:
    """Whether `_foreach_mul_` rounds the factor to the dtype of the gradient before it multiplies.

    On the CPU it does so with a number, on accelerators with a tensor without dimensions.
    """
    if gradient.dtype in (torch.float32, torch.float64):
        return False
    return isinstance(factor, torch.Tensor) or gradient.device.type == "cpu"


def _as_operand(factor: Weight, gradient: torch.Tensor) -> Weight:
    """The factor in a form that `mul_` reads as it is: a number, or a tensor that takes part in type promotion."""
    if not isinstance(factor, torch.Tensor):
        return factor
    return factor.to(gradient.device, non_blocking=True).reshape((1,) * min(gradient.dim(), 1))
