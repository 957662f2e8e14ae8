"""Gradient accumulation that never changes the gradient: which micro-batch ends a window, and how much each one weighs.

Micro-batch i of a window contributes loss × wᵢ / E to the gradients, where E is the window's expected total weight. If
the true total W turns out to be another, the gradients are multiplied by E / W at the window's end: `correction`.

With several processes E and W are totals over all of them. Their gradients are averaged, which divides by the number of
processes P: weights are multiplied by P. Without weights each process counts by its share of the rows of a batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.distributed.world import SoloWorld, World
from trimtab.errors import LossError, RecipeError

Weight = float | torch.Tensor


@dataclass(frozen=True)
class WindowRules:
    """What Accelerate's GradientAccumulationPlugin can say, and what Accelerate does by itself.

    Args:
        ends_with_epoch: The last batch of an epoch ends a window; else it goes on in the next epoch.
        exchanges_each: Processes exchange gradients in every micro-batch, not only where a window ends.
        divides_by_num_steps: A window that an epoch's end cuts short is divided by the length of a full one, as
            Accelerate does it; else by its own. Losses that come with a weight are exact either way.
    """

    ends_with_epoch: bool = True
    exchanges_each: bool = False
    divides_by_num_steps: bool = False


class Accumulation:
    """The window of micro-batches between two optimizer steps.

    Args:
        num_steps: Micro-batches in a full window.
        world: The processes that share a batch.
        rules: Where windows end, and what they are divided by.
    """

    def __init__(self, num_steps: int, world: World | None = None, rules: WindowRules | None = None) -> None:
        self.num_steps = num_steps
        self.rules = rules or WindowRules()
        self._world: World = world or SoloWorld()
        self.reset()

    def reset(self) -> None:
        """Forget the current window and the reference weight."""
        self.window = 0  # counts windows
        self.sync = True  # the current micro-batch ends its window: optimizer, schedule and zero_grad act
        self.inside = False  # within `accumulate`
        self._num_opened = 0
        self._window_length = self.num_steps
        self._awaits_backward = False  # a micro-batch was opened and no backward was seen yet
        self._counted = False  # the weight of the current micro-batch is in the total
        self._stepped = True
        self._alone = False  # the window is this one micro-batch: its mean is the whole
        self._row_share = 1.0
        self._total: Weight = 0.0
        self._total_of_all: Weight = 0.0  # the same over all processes, as of the last correction
        self._expected: Weight | None = None  # E for weighted losses, fixed by the first one
        self._weighted: bool | None = None
        self._owed: tuple[Weight, torch.device] | None = None  # what the other processes wait for

    @property
    def num_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RecipeError(f"gradient_accumulation_steps={value!r} is not possible", "a whole number from 1 up")
        self._num_steps = value

    def open_micro_batch(self, num_remaining: int | None, is_last: bool, row_share: float = 1.0) -> None:
        """A micro-batch inside `accumulate` begins.

        Args:
            num_remaining: Batches that the epoch still has after this one, or None where that is not known.
            is_last: This is the last micro-batch of its epoch.
            row_share: This process's rows of the micro-batch, as a multiple of what each process has on average.
        """
        self._row_share = row_share
        if not self.rules.ends_with_epoch:
            num_remaining, is_last = None, False
        if self.sync:
            is_full = num_remaining is None or self.rules.divides_by_num_steps
            self._begin_window(self.num_steps if is_full else min(self.num_steps, (num_remaining or 0) + 1))
        self._num_opened += 1
        self._awaits_backward, self._counted = True, False
        self.sync = is_last or self._num_opened >= self.num_steps

    def open_plain(self, row_share: float = 1.0) -> None:
        """A backward that belongs to no `accumulate`: the loop decides by itself when to step."""
        self.sync = True
        self._row_share = row_share
        self._counted = False
        if self._stepped:
            self._begin_window(self.num_steps)

    def _begin_window(self, length: int) -> None:
        self.window += 1
        self._num_opened, self._window_length = 0, length
        self._total, self._weighted, self._stepped = 0.0, None, False

    def belongs_to_micro_batch(self) -> bool:
        """Whether a backward that comes now belongs to a micro-batch that `accumulate` opened."""
        belongs = self.inside or self._awaits_backward
        self._awaits_backward = False
        return belongs

    @property
    def is_open_in_plain_loop(self) -> bool:
        """Whether backwards outside `accumulate` wait for a step."""
        return not self.inside and not self._stepped and self._num_opened == 0

    @property
    def is_waiting_for_step(self) -> bool:
        """Whether a window has begun whose gradients no optimizer has used."""
        return not self._stepped

    def step_taken(self) -> None:
        """An optimizer has stepped: a plain loop's next backward begins a new window."""
        self._stepped = True

    @property
    def exchanges(self) -> bool:
        """Whether processes exchange gradients in the current micro-batch."""
        return self.sync or self.rules.exchanges_each

    def needs_others(self, weight: Weight | None) -> bool:
        """Whether the backward that comes now exchanges something with other processes."""
        return self.sync or (weight is not None and self._expected is None)

    def share(self, loss: torch.Tensor, weight: Weight | None) -> torch.Tensor | None:
        """What a micro-batch contributes: its loss times its share of the window, or None if that is nothing at all."""
        weighted = weight is not None
        if self._weighted is not None and self._weighted is not weighted:
            raise LossError(
                "backward was called with a weight and without one in the same accumulation window",
                "pass weight= to every backward of a window, or to none",
            )
        self._weighted = weighted
        self._alone = self.sync and self._num_opened == 1
        if weight is None:
            self._count(1.0)
            if not self._row_share:
                return None
            share = loss if self._row_share == 1.0 else loss * self._row_share
            is_whole = self._window_length == 1 or (self._alone and not self.rules.divides_by_num_steps)
            return share if is_whole else share / self._window_length
        num_processes = self._world.num_processes
        if num_processes > 1 and (self._alone or self._expected is None):
            self._owed = 0.0, loss.device  # should even a single number find no room
        weight = _checked(weight, loss.device) if self._row_share else 0.0
        if self._alone:
            if num_processes == 1:
                return _nothing_if_weightless(loss, weight)
            total = self._summed(weight, loss.device)
            return _nothing_if_weightless(loss * _ratio(weight, total, num_processes), weight)
        if self._expected is None:
            self._expected = _first_expectation(self._summed(weight, loss.device), self.num_steps)
        elif isinstance(self._expected, torch.Tensor) and self._expected.device != loss.device:
            self._expected = self._expected.to(loss.device)  # from a checkpoint: a host number divides in other bits
        self._count(weight)
        return _nothing_if_weightless(loss * (weight * num_processes / self._expected), weight)

    def _summed(self, weight: Weight, device: torch.device) -> Weight:
        """The sum over the processes."""
        self._owed = weight, device
        total = self._world.total(weight, device)
        self._owed = None
        return total

    def settle(self) -> None:
        """Take part in a sum that the other processes wait for, if this one has failed just before it."""
        if self._owed is not None:
            self._summed(*self._owed)

    def _count(self, weight: Weight) -> None:
        """Several losses of one micro-batch share its weight: the first one counts."""
        if not self._counted:
            self._total = self._total + weight
            self._counted = True

    def correction(self, in_plain_loop: bool, device: torch.device) -> Weight | None:
        """The factor that makes the window's gradients true, or None where they are so already.

        Args:
            in_plain_loop: The loop decides by itself when a window ends.
            device: Where the loss was computed.
        """
        if self._alone:
            return None
        if not self._weighted:
            if in_plain_loop or self.rules.divides_by_num_steps or self._total in (0, self._window_length):
                return None
            return self._window_length / self._total
        assert self._expected is not None
        mine = self._total
        total = self._world.total(mine.to(device) if isinstance(mine, torch.Tensor) else mine, device)
        self._total_of_all = total
        if isinstance(total, torch.Tensor) or isinstance(self._expected, torch.Tensor):
            total = torch.as_tensor(total)
            return torch.where(total > 0, self._expected / total, torch.ones_like(total))  # of nothing: zero anyway
        if total == self._expected or total == 0:
            return None
        return self._expected / total

    def state_dict(self) -> dict[str, Any]:
        """The reference weight, which must survive a resume for the same rounding, and the open window.

        It is the same on every process, so that any number of processes can load it.
        """
        names = ("sync", "_num_opened", "_window_length", "_stepped", "_expected", "_weighted")
        is_sum = self._weighted and self._world.num_processes > 1
        return {name: getattr(self, name) for name in names} | {"_total": self._total_of_all if is_sum else self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        for name, value in state.items():
            setattr(self, name, value)
        self._total_of_all = self._total
        if self._weighted and self._world.process_index > 0:
            self._total = self._total * 0  # the first process counts what all have seen; it must not count twice

    def abandon_window(self) -> None:
        """The open window has not begun; the reference weight stays."""
        self.sync = self._stepped = True
        self._num_opened, self._window_length = 0, self.num_steps
        self._total = self._total_of_all = 0.0

    def undo_point(self) -> Callable[[], None]:
        """A function that takes `load_state_dict` back: what a process counted on its own is in no state dict."""
        before = dict(vars(self))
        return lambda: vars(self).update(before)


def _checked(weight: Weight, device: torch.device) -> Weight:
    """A weight as a number where the host can know it, else as a scalar on the device of the loss."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise LossError(
                f"weight has shape {tuple(weight.shape)}, but one number is needed: the rows or tokens of the loss",
                "for example weight=(labels != -100).sum()",
            )
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).to(device=device, dtype=torch.float32)
    number = float(weight)
    if not math.isfinite(number) or number < 0:
        raise LossError(
            f"weight={number} is not possible", "the number of rows or tokens that the mean loss stands for"
        )
    return number


def _nothing_if_weightless(contribution: torch.Tensor, weight: Weight) -> torch.Tensor | None:
    """A micro-batch without labels may have a NaN loss, and contributes nothing. No host read for device weights."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, contribution, torch.zeros_like(contribution))
    return contribution if weight > 0 else None


def _ratio(weight: Weight, total: Weight, num_processes: int) -> Weight:
    """The factor of a window's only micro-batch; nothing where no process has anything."""
    if isinstance(total, torch.Tensor):
        return weight * num_processes / total.clamp(min=torch.finfo(total.dtype).tiny)
    return weight * num_processes / total if total else 0.0


def _first_expectation(weight: Weight, num_steps: int) -> Weight:
    """E is only a reference, so the first micro-batch times the window's length is as good as any."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, weight * num_steps, torch.full_like(weight, num_steps))
    return weight * num_steps if weight > 0 else float(num_steps)
