"""Prepared optimizers and schedulers: they act when a window ends, and a schedule waits for a step that was skipped."""

from collections.abc import Callable
from typing import Any

import torch

from trimtab.engine.accumulation import Accumulation
from trimtab.engine.gradients import Gradients
from trimtab.errors import RecipeError


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only when an accumulation window ends and its gradients are finite.

    Everything else is the optimizer's own; `optimizer` is the one given to `prepare`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, accumulation: Accumulation, gradients: Gradients) -> None:
        self.optimizer = optimizer
        self.step_was_skipped = False
        self._accumulation = accumulation
        self._gradients = gradients

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    # Optimizer's own methods read these, and schedulers write into them.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the optimizer itself."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the optimizer itself."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the optimizer itself."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the window ends here and no gradient overflowed; else do nothing."""
        if not self._accumulation.sync:
            return None
        if closure is not None and self._gradients.is_scaling:
            raise RecipeError(
                "optimizer.step(closure) cannot be used with fp16: an overflow inside the closure would go unseen",
                'use mixed_precision="bf16" or "no"',
            )
        self.step_was_skipped = self._gradients.overflowed(self.optimizer)
        if self.step_was_skipped:
            return None
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients if the window ends here; inside a window they are still needed."""
        if self._accumulation.sync:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self._gradients.discarded(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the optimizer itself."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The state of the optimizer itself."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the optimizer itself."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Training mode, for the optimizers that have one."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Evaluation mode, for the optimizers that have one."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


class PreparedScheduler:
    """A learning-rate schedule that counts real optimizer steps.

    Args:
        scheduler: Any scheduler with `step` and `state_dict`.
        optimizers: The prepared optimizers that it waits for.
        accumulation: The current window.
        follows_optimizer: False lets every call of `step` count, whatever the optimizer did.
        num_steps_each: Steps of the schedule for each one of the optimizer. Accelerate takes one for each process
            where every process has a batch of its own, so that a schedule counts batches of the loader.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizers: list[PreparedOptimizer],
        accumulation: Accumulation,
        follows_optimizer: bool = True,
        num_steps_each: int = 1,
    ) -> None:
        self.scheduler = scheduler
        self._optimizers = optimizers
        self._accumulation = accumulation
        self._follows_optimizer = follows_optimizer
        self._num_steps_each = num_steps_each

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step if the optimizer did: once a window, and not after an overflow."""
        if not self._follows_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self._optimizer_stepped():
            for _ in range(self._num_steps_each):
                if self._num_steps_each == 1 or not self._is_at_its_end():
                    self.scheduler.step(*args, **kwargs)

    def _is_at_its_end(self) -> bool:
        """Whether a schedule that refuses more steps than it was made for, such as OneCycleLR, has taken them all."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total

    def _optimizer_stepped(self) -> bool:
        return self._accumulation.sync and not any(optimizer.step_was_skipped for optimizer in self._optimizers)

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler itself."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the scheduler itself."""
        self.scheduler.load_state_dict(state_dict)


def optimizers_of(scheduler: Any, prepared: list[PreparedOptimizer]) -> list[PreparedOptimizer]:
    """The prepared optimizers that `scheduler` drives: its own, or all where it does not say."""
    own = getattr(scheduler, "optimizer", None)
    matching = [optimizer for optimizer in prepared if own is optimizer or own is optimizer.optimizer]
    return matching or prepared
