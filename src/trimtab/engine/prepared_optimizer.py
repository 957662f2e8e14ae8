"""Prepared optimizers and schedulers: they step at the end of a window, and a scheduler skips a skipped step."""

from collections.abc import Callable
from typing import Any

import torch

from trimtab.engine.accumulation import Accumulation
from trimtab.engine.gradients import Gradients
from trimtab.errors import RecipeError


class PreparedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only at the end of an accumulation window, and if its gradients are finite.

    All other attributes are those of `optimizer`, the one given to `prepare`.
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

    # methods of torch's Optimizer read these, and schedulers write into them
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the wrapped optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the wrapped optimizer."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the wrapped optimizer."""
        return self.optimizer.defaults

    def __repr__(self) -> str:
        return f"Prepared({self.optimizer!r})"

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step if the window ends here and no gradient overflowed."""
        if not self._accumulation.sync:
            return None
        if closure is not None and self._gradients.is_scaling:
            raise RecipeError(
                "optimizer.step(closure) is not supported with fp16: an overflow in the closure would not be detected",
                'mixed_precision="bf16" or "no"',
            )
        self.step_was_skipped = self._gradients.overflowed(self.optimizer)
        if self.step_was_skipped:
            return None
        return self.optimizer.step() if closure is None else self.optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients if the window ends here; inside a window they are still needed."""
        if self._accumulation.sync:
            self.optimizer.zero_grad(set_to_none=set_to_none)
            self._gradients.discarded(self.optimizer)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group to the wrapped optimizer."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of the wrapped optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict into the wrapped optimizer."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Switch an optimizer that has modes to training mode."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Switch an optimizer that has modes to evaluation mode."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()


class PreparedScheduler:
    """A learning-rate scheduler that steps only after an optimizer step.

    All other attributes are those of `scheduler`, the one given to `prepare`.

    Args:
        scheduler: Any scheduler with `step` and `state_dict`.
        optimizers: The prepared optimizers that it follows.
        accumulation: The current window.
        follows_optimizer: False makes every call of `step` count.
        num_steps_each: Steps of the scheduler per optimizer step. Accelerate takes one per process if every process has
            its own batches, so that a schedule counts batches of the loader.
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
        """Step if the optimizer stepped: once per window, and not after an overflow."""
        if not self._follows_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif self._optimizer_stepped():
            for _ in range(self._num_steps_each):
                if self._num_steps_each == 1 or not self._is_at_its_end():
                    self.scheduler.step(*args, **kwargs)

    def _is_at_its_end(self) -> bool:
        """Return whether a scheduler that raises after its last step, such as OneCycleLR, has taken all its steps."""
        total = getattr(self.scheduler, "total_steps", None)
        return total is not None and self.scheduler._step_count > total

    def _optimizer_stepped(self) -> bool:
        return self._accumulation.sync and not any(optimizer.step_was_skipped for optimizer in self._optimizers)


def optimizers_of(scheduler: Any, prepared: list[PreparedOptimizer]) -> list[PreparedOptimizer]:
    """Return the prepared optimizers that `scheduler` drives; all of them if it has no attribute `optimizer`."""
    own = getattr(scheduler, "optimizer", None)
    matching = [optimizer for optimizer in prepared if own is optimizer or own is optimizer.optimizer]
    return matching or prepared
