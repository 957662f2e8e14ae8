"""Update each parameter inside backward, as soon as its gradient is complete, and free the gradient.

The gradients of a model then never exist at the same time. A parameter that is used several times (tied weights) has
its complete gradient when autograd has added up all of them, which is when the hook is called.

The optimizer is an ordinary one: it is called with one parameter at a time, and once more, without gradients, at the
usual end of a step. Its groups, state and checkpoints are those of a step after backward. Results are bit-identical,
except for stochastic rounding, which draws random numbers per parameter instead of per group.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trimtab.model.gradient_hooks import register_gradient_hook
from trimtab.model.streamed_blocks import computing_device

CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WRAPPER = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__  # torch's code around a step


class AfterBackward:
    """Weights change after backward: the default, which does nothing inside backward."""

    has_changed_weights = False  # whether weights are updated in the backward of the current window
    words_if_divided = ""  # the effect of dividing a batch into micro-batches, for a message
    words_against_dividing = ""  # why a batch cannot be divided; empty if it can

    is_updating = False  # in the backward of the current window

    def begin_window(self, num_micro_batches: int, max_norm: float | None = None) -> None:
        """Prepare for the micro-batches of a step, and for clipping to a norm."""

    def finish_window(self) -> torch.Tensor | None:
        """Return the norm of the gradients before they were clipped; None if they were not."""
        return None

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip the gradients of the window with a custom method, and return their norm; None if there is none."""
        return None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which no weights change."""
        yield


class InBackward(AfterBackward):
    """Update the parameters of an optimizer in the backward of windows that have one micro-batch.

    Gradients of windows with several micro-batches accumulate as usual, and weights change after them.

    Args:
        optimizer: The optimizer; parameters that are frozen now may be unfrozen later.
    """

    words_if_divided = "; weights change after backward from now on"

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._is_held = False
        self._norms: list[torch.Tensor] = []  # norms of the gradients of the current window
        self._last_norm: torch.Tensor | None = None  # norm of all gradients of the previous window
        self._max_norm: float | None = None
        self._factor: torch.Tensor | None = None
        number = 0
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                register_gradient_hook(parameter, self._finish, group=index, number=number)
                number += 1

    def begin_window(self, num_micro_batches: int, max_norm: float | None = None) -> None:
        """Update in backward if the window has one micro-batch; clip by the norm of the previous window."""
        self.is_updating, self.has_changed_weights = num_micro_batches == 1, False
        self._norms, self._max_norm, self._factor = [], max_norm, None
        if max_norm is not None and self._last_norm is not None:
            self._factor = (max_norm / (self._last_norm + CLIP_EPSILON)).clamp(max=1.0)

    def finish_window(self) -> torch.Tensor | None:
        """Return the norm of the gradients before clipping, by which the next window is clipped."""
        if self._norms:
            self._last_norm = torch.linalg.vector_norm(torch.stack(self._norms))
        return self._last_norm if self._norms else None

    def state_dict(self) -> dict[str, Any]:
        """Return the norm by which the next window is clipped."""
        return {"norm": self._last_norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        device = computing_device(self._optimizer.param_groups[0]["params"][0])
        self._last_norm = None if state["norm"] is None else state["norm"].to(device)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A context in which gradients are freed as in a step, and no weights change."""
        before, self._is_held = self._is_held, True
        try:
            yield
        finally:
            self._is_held = before

    def _finish(self, parameter: torch.Tensor, group: int, number: int) -> None:
        """Use and free a complete gradient."""
        if not self.is_updating:
            return
        if not self._is_held:
            self.has_changed_weights = True
            self._update(parameter, group, number)
        parameter.grad = None

    def _update(self, parameter: torch.Tensor, group: int, number: int) -> None:
        """Take the optimizer's step for one parameter."""
        if self._max_norm is not None:
            self._clip(parameter)
        optimizer = self._optimizer
        groups = optimizer.param_groups
        own = {**groups[group], "params": [parameter]}
        if "rounding_seed" in own:  # every parameter has its own random numbers; the step count is that of the group
            own["rounding_seed"] = f"{own['rounding_seed']} {number}"
        optimizer.param_groups = [own]
        try:
            _step_of_class(optimizer)(optimizer)  # not the instance's method, whose calls schedulers count
        finally:
            optimizer.param_groups = groups

    @torch.no_grad()
    def _clip(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        self._norms.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32))
        if self._factor is not None:
            parameter.grad.mul_(self._factor)


def _step_of_class(optimizer: torch.optim.Optimizer) -> Callable[[torch.optim.Optimizer], Any]:
    """The step of an optimizer's class, without torch's wrapper around it, if that has nothing to do.

    The wrapper calls hooks and a profiler, which takes about as long as the Python code of an update itself.
    """
    step: Any = type(optimizer).step
    own = vars(optimizer)
    is_watched = (
        own.get("_optimizer_step_pre_hooks", True)
        or own.get("_optimizer_step_post_hooks", True)
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd.profiler._is_profiler_enabled
    )
    is_wrapper = getattr(step, "__code__", None) is _WRAPPER  # not if someone else has wrapped it
    return step.__wrapped__ if is_wrapper and not is_watched else step  # type: ignore[no-any-return]


_known: WeakKeyDictionary[torch.nn.Module, AfterBackward] = WeakKeyDictionary()
_AFTER_BACKWARD = AfterBackward()


def update_in_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters of a model in backward from now on.

    Args:
        model: The prepared model.
        optimizer: The optimizer of its parameters, before it is prepared.
    """
    set_updates(model, InBackward(optimizer))


def set_updates(model: torch.nn.Module, updates: AfterBackward) -> None:
    """Change when the weights of a model are updated, from now on."""
    _known[model] = updates


def updates_of(model: torch.nn.Module) -> AfterBackward:
    """When the weights of a model are updated."""
    return _known.get(model, _AFTER_BACKWARD)
