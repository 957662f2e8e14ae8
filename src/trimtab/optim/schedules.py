"""Learning-rate schedules by name, as factors of the learning rate per optimizer step.

Each shape is a callable object instead of a closure, so that `LambdaLR` can pickle it and include its numbers in its
state. Step 0 is the first optimizer step. After `num_steps`, a schedule with an end keeps its last factor.
"""

import copy
import difflib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from trimtab.errors import RecipeError
from trimtab.log import say

SCHEDULES = ("linear", "cosine", "constant", "inverse-sqrt", "noam", "warmup-stable-decay")

_DECAY_FRACTION = 0.2  # share of all steps, at the end of warmup-stable-decay
_TIMESCALE_WITHOUT_WARMUP = 10_000  # default time scale of inverse-sqrt, as in transformers


Shape = Callable[[int], float]  # the learning-rate factor of an optimizer step, counted from 0


def _warmup(step: int, warmup_steps: int) -> float:
    """Increase linearly from 0 to 1, then stay at 1."""
    return step / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, warmup_steps: int, num_steps: int) -> float:
    """Progress from the end of the warmup (0) to the last step (1)."""
    return 1.0 if step >= num_steps else max(0, step - warmup_steps) / max(1, num_steps - warmup_steps)


@dataclass(frozen=True)
class Constant:
    """Warmup, then constant."""

    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Linear:
    """Warmup, then linear decay to 0."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return _warmup(step, self.warmup_steps) * (1.0 - _progress(step, self.warmup_steps, self.num_steps))


@dataclass(frozen=True)
class Cosine:
    """Warmup, then cosine decay to 0."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        decay = 0.5 * (1.0 + math.cos(math.pi * _progress(step, self.warmup_steps, self.num_steps)))
        return _warmup(step, self.warmup_steps) * decay


@dataclass(frozen=True)
class InverseSqrt:
    """Warmup, then decay with the inverse square root of the step."""

    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        timescale = self.warmup_steps or _TIMESCALE_WITHOUT_WARMUP
        return math.sqrt(timescale / (step - self.warmup_steps + timescale))


@dataclass(frozen=True)
class Noam:
    """The schedule of the original transformer, whose steps count from 1."""

    warmup_steps: int
    d_model: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        count = step + 1
        return float(self.d_model**-0.5 * min(count**-0.5, count * self.warmup_steps**-1.5))


@dataclass(frozen=True)
class WarmupStableDecay:
    """Warmup, then constant, then linear decay to 0 over the last fifth of the steps."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step; where warmup and decay overlap, the smaller of the two."""
        decay = max(0.0, (self.num_steps - step) / (_DECAY_FRACTION * self.num_steps))
        return min(_warmup(step, self.warmup_steps), decay)


def build_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int | None,
    warmup_steps: int,
    d_model: int | None = None,
) -> LambdaLR:
    """Build a learning-rate scheduler, to be stepped once after each optimizer step.

    Args:
        name: "linear", "cosine", "constant", "inverse-sqrt", "noam" or "warmup-stable-decay".
        optimizer: The factors multiply its learning rate; for noam that is the scale, 1.0 in the original.
        num_steps: Optimizer steps of the whole run; None if unknown.
        warmup_steps: Warmup steps.
        d_model: Width of the model, for noam.
    """
    shape = _shape(name, num_steps, warmup_steps, d_model)
    if num_steps is not None and warmup_steps > num_steps:
        say(f"the warmup of {warmup_steps} steps is longer than the run of {num_steps}: the learning rate never peaks")
    if isinstance(shape, Noam):
        highest = optimizer.param_groups[0]["lr"] * shape(warmup_steps - 1)
        say(f"noam: the learning rate rises to {highest:.1e} at step {warmup_steps}; train.lr is its scale (often 1.0)")
    return LambdaLR(optimizer, shape)


def _shape(name: str, num_steps: int | None, warmup_steps: int, d_model: int | None) -> Shape:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"train.schedule={name!r} is not valid{meant}", f"use one of {', '.join(SCHEDULES)}")
    if warmup_steps < 0:
        raise RecipeError(
            f"train.warmup={warmup_steps} is not valid", "use a number of steps of at least 0, or a share"
        )
    if name == "constant":
        return Constant(warmup_steps)
    if name == "inverse-sqrt":
        return InverseSqrt(warmup_steps)
    if name == "noam":
        return _noam(warmup_steps, d_model)
    if num_steps is None:
        raise RecipeError(
            f"train.schedule: {name} needs the number of steps of the run, but the length of the data is unknown",
            "set train.max_steps, or train.schedule: constant or inverse-sqrt",
        )
    if num_steps < 1:
        raise RecipeError(f"a run of {num_steps} steps has no schedule", "increase train.max_steps or train.epochs")
    if name == "linear":
        return Linear(warmup_steps, num_steps)
    if name == "cosine":
        return Cosine(warmup_steps, num_steps)
    return WarmupStableDecay(warmup_steps, num_steps)


def _noam(warmup_steps: int, d_model: int | None) -> Noam:
    if warmup_steps < 1:
        raise RecipeError("train.schedule: noam needs a warmup", "set train.warmup: 4000, as in the original")
    if d_model is None or d_model < 1:
        raise RecipeError(
            "train.schedule: noam needs the width of the model, which its config does not contain",
            "set hidden_size or d_model in the model's config, or train.schedule: inverse-sqrt",
        )
    return Noam(warmup_steps, d_model)


def copy_shapes(scheduler: LambdaLR) -> list[Shape]:
    """Copy the shapes that a schedule was built with, before loading a state replaces their numbers."""
    shapes: list[Any] = [copy.copy(shape) for shape in scheduler.lr_lambdas]
    return shapes


def reshape(scheduler: LambdaLR, shapes: list[Shape], rates: list[float]) -> str | None:
    """Apply the shapes and learning rates of the current recipe to a schedule whose state was loaded.

    Args:
        scheduler: The schedule, at some step.
        shapes: The result of `copy_shapes` before the state was loaded.
        rates: The learning rate of each parameter group, which the factors multiply from now on.

    Returns:
        A message about the change of the learning rate; None if it is unchanged.
    """
    stretched = shapes != list(scheduler.lr_lambdas)
    if not stretched and scheduler.base_lrs == rates:
        return None
    before = scheduler.optimizer.param_groups[0]["lr"]
    scheduler.lr_lambdas = list(shapes)
    scheduler.base_lrs = list(rates)
    for group, shape, lr in zip(scheduler.optimizer.param_groups, shapes, rates, strict=True):
        group["initial_lr"], group["lr"] = lr, lr * shape(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    now = scheduler.optimizer.param_groups[0]["lr"]
    if now == before:
        return None
    how = "is stretched over all steps" if stretched and hasattr(shapes[0], "num_steps") else "continues"
    return f"the schedule {how}: the learning rate goes from {before:.3g} to {now:.3g} at step {scheduler.last_epoch}"
