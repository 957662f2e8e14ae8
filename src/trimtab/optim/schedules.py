"""Learning-rate schedules by name, as factors of the learning rate; they count optimizer steps.

Each shape is a small object without closures, so that a scheduler can be pickled and its numbers are part of its state.
Step 0 is the first optimizer step. After the last planned step the factor of a schedule that ends stays at its end.
"""

import copy
import difflib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim.lr_scheduler import LambdaLR

from trimtab.errors import RecipeError
from trimtab.log import say

SCHEDULES = ("linear", "cosine", "constant", "inverse-sqrt", "noam", "warmup-stable-decay")

_DECAY_SHARE = 0.2  # of all steps, at the end of warmup-stable-decay
_TIMESCALE_WITHOUT_WARMUP = 10_000  # of inverse-sqrt, as in transformers


class Shape(Protocol):
    """The factor of the learning rate at each step."""

    def __call__(self, step: int) -> float:
        """The factor for the optimizer step `step`, counted from 0."""


def _warmup(step: int, warmup_steps: int) -> float:
    """Up from 0 in a line, and 1 from then on."""
    return step / warmup_steps if step < warmup_steps else 1.0


def _progress(step: int, warmup_steps: int, num_steps: int) -> float:
    """How much of the way from the end of the warmup to the last step is done: 0 to 1."""
    return 1.0 if step >= num_steps else max(0, step - warmup_steps) / max(1, num_steps - warmup_steps)


@dataclass(frozen=True)
class Constant:
    """Warmup, then no change."""

    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return _warmup(step, self.warmup_steps)


@dataclass(frozen=True)
class Linear:
    """Warmup, then down to 0 in a line."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        return _warmup(step, self.warmup_steps) * (1.0 - _progress(step, self.warmup_steps, self.num_steps))


@dataclass(frozen=True)
class Cosine:
    """Warmup, then down to 0 in half a wave."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        wave = 0.5 * (1.0 + math.cos(math.pi * _progress(step, self.warmup_steps, self.num_steps)))
        return _warmup(step, self.warmup_steps) * wave


@dataclass(frozen=True)
class InverseSqrt:
    """Warmup, then down with the root of the steps."""

    warmup_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        if step < self.warmup_steps:
            return _warmup(step, self.warmup_steps)
        timescale = self.warmup_steps or _TIMESCALE_WITHOUT_WARMUP
        return math.sqrt(timescale / (step - self.warmup_steps + timescale))


@dataclass(frozen=True)
class Noam:
    """The schedule of the original transformer; its steps count from 1."""

    warmup_steps: int
    d_model: int

    def __call__(self, step: int) -> float:
        """The factor at a step."""
        count = step + 1
        return float(self.d_model**-0.5 * min(count**-0.5, count * self.warmup_steps**-1.5))


@dataclass(frozen=True)
class WarmupStableDecay:
    """Warmup, then no change, then down to 0 in a line over the last fifth of the steps."""

    warmup_steps: int
    num_steps: int

    def __call__(self, step: int) -> float:
        """The factor at a step; a warmup that reaches into the decay is cut by it."""
        decay = max(0.0, (self.num_steps - step) / (_DECAY_SHARE * self.num_steps))
        return min(_warmup(step, self.warmup_steps), decay)


def build_schedule(
    name: str,
    optimizer: torch.optim.Optimizer,
    *,
    num_steps: int | None,
    warmup_steps: int,
    d_model: int | None = None,
) -> LambdaLR:
    """Make the scheduler that moves the learning rate of an optimizer.

    Args:
        name: "linear", "cosine", "constant", "inverse-sqrt", "noam" or "warmup-stable-decay".
        optimizer: Its learning rate is what the factors multiply; for noam it is the scale, 1.0 in the original.
        num_steps: Optimizer steps of the whole run; None where that is not known.
        warmup_steps: Steps at the beginning in which the learning rate rises.
        d_model: Width of the model, for noam.

    Returns:
        A scheduler to be stepped once after each optimizer step.
    """
    shape = _shape(name, num_steps, warmup_steps, d_model)
    if num_steps is not None and warmup_steps > num_steps:
        say(f"the warmup of {warmup_steps} steps is longer than the run of {num_steps}: the learning rate only rises")
    if isinstance(shape, Noam):
        highest = optimizer.param_groups[0]["lr"] * shape(warmup_steps - 1)
        say(f"noam: the learning rate rises to {highest:.1e} at step {warmup_steps}; train.lr is its scale (often 1.0)")
    return LambdaLR(optimizer, shape)


def _shape(name: str, num_steps: int | None, warmup_steps: int, d_model: int | None) -> Shape:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower().replace("_", "-"), SCHEDULES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"train.schedule={name!r} is not known{meant}", f"one of {', '.join(SCHEDULES)}")
    if warmup_steps < 0:
        raise RecipeError(f"train.warmup={warmup_steps} is not possible", "a number of steps from 0 up, or a share")
    if name == "constant":
        return Constant(warmup_steps)
    if name == "inverse-sqrt":
        return InverseSqrt(warmup_steps)
    if name == "noam":
        return _noam(warmup_steps, d_model)
    if num_steps is None:
        raise RecipeError(
            f"train.schedule: {name} has to know how many steps the run has, and the data does not say how long it is",
            "set train.max_steps, or train.schedule: constant or inverse-sqrt",
        )
    if num_steps < 1:
        raise RecipeError(f"a run of {num_steps} steps has no schedule", "set train.max_steps or train.epochs higher")
    if name == "linear":
        return Linear(warmup_steps, num_steps)
    if name == "cosine":
        return Cosine(warmup_steps, num_steps)
    return WarmupStableDecay(warmup_steps, num_steps)


def _noam(warmup_steps: int, d_model: int | None) -> Noam:
    if warmup_steps < 1:
        raise RecipeError("train.schedule: noam has to have a warmup", "set train.warmup: 4000, as in the original")
    if d_model is None or d_model < 1:
        raise RecipeError(
            "train.schedule: noam has to know the width of the model, and its config does not give one",
            "set hidden_size or d_model in the model's config, or train.schedule: inverse-sqrt",
        )
    return Noam(warmup_steps, d_model)


def shapes_of(scheduler: LambdaLR) -> list[Shape]:
    """The shapes that a schedule was built with; a state that is loaded later brings its own."""
    shapes: list[Any] = [copy.copy(shape) for shape in scheduler.lr_lambdas]
    return shapes


def reshape(scheduler: LambdaLR, shapes: list[Shape], lr: float) -> str | None:
    """Let a schedule whose state was loaded go on with other shapes or another learning rate.

    Args:
        scheduler: The schedule, at some step.
        shapes: What `shapes_of` gave before the state was loaded.
        lr: The highest learning rate from now on.

    Returns:
        What that means, in words; None where nothing is different.
    """
    stretched = shapes != list(scheduler.lr_lambdas)
    if not stretched and scheduler.base_lrs == [lr] * len(shapes):
        return None
    before = scheduler.optimizer.param_groups[0]["lr"]
    scheduler.lr_lambdas = list(shapes)
    scheduler.base_lrs = [lr] * len(shapes)
    for group, shape in zip(scheduler.optimizer.param_groups, shapes, strict=True):
        group["initial_lr"], group["lr"] = lr, lr * shape(scheduler.last_epoch)
    scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
    now = scheduler.optimizer.param_groups[0]["lr"]
    if now == before:
        return None
    how = "is stretched over all steps" if stretched and hasattr(shapes[0], "num_steps") else "continues"
    return f"the schedule {how}: the learning rate goes from {before:.3g} to {now:.3g} at step {scheduler.last_epoch}"
