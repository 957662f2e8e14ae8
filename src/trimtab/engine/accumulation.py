"""Exact gradient accumulation: which micro-batch ends a window, and the weight of each micro-batch.

Micro-batch i of a window contributes loss × wᵢ / E to the gradients, where E is the expected total weight of a window.
If the actual total W differs, the gradients are multiplied by E / W at the end of the window: `correction`.

With several processes E and W are totals over all of them. Their gradients are averaged, which divides by the number of
processes P, so weights are multiplied by P. Without weights, each process is weighted by its share of the rows of a
batch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.prepared_loader import ActiveLoaders
from trimtab.errors import LossError, RecipeError

Weight = float | torch.Tensor


@dataclass(frozen=True)
class WindowRules:
    """Where windows end and how they are normalized: the options of Accelerate's GradientAccumulationPlugin.

    Args:
        ends_with_epoch: Whether the last batch of an epoch ends a window; else the window continues in the next epoch.
        exchanges_each: Whether processes exchange gradients in every micro-batch, not only at the end of a window.
        divides_by_num_steps: Whether a window that is cut short by the end of an epoch is divided by the length of a
            full window, as in Accelerate; else by its own length. Losses with a weight are exact either way.
    """

    ends_with_epoch: bool = True
    exchanges_each: bool = False
    divides_by_num_steps: bool = False


class Accumulation:
    """The window of micro-batches between two optimizer steps.

    Args:
        num_steps: Micro-batches in a full window.
        world: The processes that share a batch.
        rules: Where windows end and how they are normalized.
    """

    def __init__(self, num_steps: int, world: World | None = None, rules: WindowRules | None = None) -> None:
        self.num_steps = num_steps
        self.rules = rules or WindowRules()
        self._world: World = world or World()
        self.reset()

    def reset(self) -> None:
        """Discard the current window and the expected weight."""
        # `state_dict` uses some of these attribute names as keys of a checkpoint.
        self.window = 0  # number of windows begun
        self.sync = True  # the current micro-batch ends its window: optimizer, scheduler and zero_grad act
        self.inside = False  # inside an `accumulate` context
        self._num_opened = 0
        self._window_length = self.num_steps
        self._awaits_backward = False  # a micro-batch was opened and its backward has not run yet
        self._counted = False  # the total contains the weight of the current micro-batch
        self._stepped = True
        self._alone = False  # the window has a single micro-batch, whose mean needs no weight
        self._row_share = 1.0
        self._total: Weight = 0.0
        self._total_of_all: Weight = 0.0  # the total over all processes, as of the last correction
        self._expected: Weight | None = None  # E for weighted losses, set by the first of them
        self._weighted: bool | None = None
        # a sum over processes that the other processes are waiting for
        self._pending: tuple[Weight, torch.device] | None = None

    @property
    def num_steps(self) -> int:
        """Micro-batches in a full window."""
        return self._num_steps

    @num_steps.setter
    def num_steps(self, value: int) -> None:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RecipeError(f"gradient_accumulation_steps={value!r} is not valid", "use an integer of at least 1")
        self._num_steps = value

    def open_micro_batch(self, num_remaining: int | None, is_last: bool, row_share: float = 1.0) -> None:
        """Begin a micro-batch inside `accumulate`.

        Args:
            num_remaining: Batches of the epoch after this one; None if unknown.
            is_last: Whether this is the last micro-batch of its epoch.
            row_share: This process's rows of the micro-batch divided by the average of all processes.
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
        """Begin a backward outside `accumulate`: the loop itself decides when to step."""
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
        """Return whether the next backward belongs to a micro-batch that `accumulate` opened."""
        belongs = self.inside or self._awaits_backward
        self._awaits_backward = False
        return belongs

    @property
    def is_open_in_plain_loop(self) -> bool:
        """Whether gradients from backwards outside `accumulate` are waiting for an optimizer step."""
        return not self.inside and not self._stepped and self._num_opened == 0

    @property
    def is_waiting_for_step(self) -> bool:
        """Whether a window has started whose gradients no optimizer step has used yet."""
        return not self._stepped

    def step_taken(self) -> None:
        """Note an optimizer step: the next backward of a plain loop begins a new window."""
        self._stepped = True

    @property
    def exchanges(self) -> bool:
        """Whether processes exchange gradients in the current micro-batch."""
        return self.sync or self.rules.exchanges_each

    def needs_others(self, weight: Weight | None) -> bool:
        """Return whether the next backward exchanges anything with other processes."""
        return self.sync or (weight is not None and self._expected is None)

    def contribution(self, loss: torch.Tensor, weight: Weight | None) -> torch.Tensor | None:
        """Return the loss times the micro-batch's share of the window, or None if the share is zero."""
        self._note_kind(weight)
        if weight is None:
            self._count(1.0)
            if not self._row_share:
                return None
            share = loss if self._row_share == 1.0 else loss * self._row_share
            return share if self._is_whole else share / self._window_length
        num_processes = self._world.num_processes
        if num_processes > 1 and (self._alone or self._expected is None):
            self._pending = 0.0, loss.device  # in case allocating the weight itself runs out of memory
        weight = _checked_weight(weight, loss.device) if self._row_share else 0.0
        if self._alone:
            if num_processes == 1:
                return _none_if_weightless(loss, weight)
            total = self._sum_over_processes(weight, loss.device)
            return _none_if_weightless(loss * _ratio(weight, total, num_processes), weight)
        if self._expected is None:
            self._expected = _initial_expectation(self._sum_over_processes(weight, loss.device), self.num_steps)
        elif isinstance(self._expected, torch.Tensor) and self._expected.device != loss.device:
            # loaded from a checkpoint; as a host number it would round differently in the division
            self._expected = self._expected.to(loss.device)
        self._count(weight)
        return _none_if_weightless(loss * (weight * num_processes / self._expected), weight)

    def _note_kind(self, weight: Weight | None) -> None:
        """Note whether the losses of the window have weights, and whether it has a single micro-batch."""
        is_weighted = weight is not None
        if self._weighted is not None and self._weighted is not is_weighted:
            raise LossError(
                "backward was called with a weight and without one in the same accumulation window",
                "pass weight= to every backward of a window, or to none",
            )
        self._weighted = is_weighted
        self._alone = self.sync and self._num_opened == 1

    @property
    def _is_whole(self) -> bool:
        """Whether a loss without a weight is the loss of the whole window."""
        return self._window_length == 1 or (self._alone and not self.rules.divides_by_num_steps)

    def open_replay(self, usual_weight: Weight | None) -> Weight | None:
        """Return the divisor for the weight of a micro-batch that computes its own contribution; None if it is alone.

        Without a weight, the loss itself is divided by this number.

        Args:
            usual_weight: The weight of such a micro-batch, for the first one of a run.
        """
        self._note_kind(usual_weight)
        if usual_weight is None:
            return None if self._is_whole else float(self._window_length)
        if self._alone:
            return None
        if self._expected is None:
            self._expected = _initial_expectation(usual_weight, self.num_steps)
        elif isinstance(self._expected, torch.Tensor) and isinstance(usual_weight, torch.Tensor):
            self._expected = self._expected.to(usual_weight.device)  # loaded from a checkpoint
        return self._expected

    def count_replay(self, weight: Weight | None) -> None:
        """Add the weight of a micro-batch that computed its own contribution."""
        if weight is None:
            self._count(1.0)
        elif not self._alone:
            self._count(weight)

    def _sum_over_processes(self, weight: Weight, device: torch.device) -> Weight:
        self._pending = weight, device
        total = self._world.total(weight, device)
        self._pending = None
        return total

    def finish_pending_sum(self) -> None:
        """Take part in a sum that the other processes wait for, if this process failed just before it."""
        if self._pending is not None:
            self._sum_over_processes(*self._pending)

    def _count(self, weight: Weight) -> None:
        """Add a weight to the total once per micro-batch: several losses of one micro-batch share its weight."""
        if not self._counted:
            self._total = self._total + weight
            self._counted = True

    def correction(self, in_plain_loop: bool, device: torch.device) -> Weight | None:
        """Return the factor that normalizes the gradients of a window, or None if it is 1.

        Args:
            in_plain_loop: Whether the loop itself decides when a window ends.
            device: The device of the loss.
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
            return torch.where(total > 0, self._expected / total, torch.ones_like(total))  # total 0: gradients are 0
        if total == self._expected or total == 0:
            return None
        return self._expected / total

    def state_dict(self) -> dict[str, Any]:
        """Return the open window, and the expected weight: a resumed run needs it for the same rounding.

        The state is the same on every process, so any number of processes can load it.
        """
        names = ("sync", "_num_opened", "_window_length", "_stepped", "_expected", "_weighted")
        is_sum = self._weighted and self._world.num_processes > 1
        return {name: getattr(self, name) for name in names} | {"_total": self._total_of_all if is_sum else self._total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for name, value in state.items():
            setattr(self, name, value)
        self._total_of_all = self._total
        if self._weighted and self._world.process_index > 0:
            self._total = self._total * 0  # the total of all processes is counted once, by rank 0

    def abandon_window(self) -> None:
        """Reset to the state before the open window began; keep the expected weight."""
        self.sync = self._stepped = True
        self._num_opened, self._window_length = 0, self.num_steps
        self._total = self._total_of_all = 0.0

    def undo_point(self) -> Callable[[], None]:
        """Return a function that undoes `load_state_dict`; a state dict lacks the counts of this process."""
        before = dict(vars(self))
        return lambda: vars(self).update(before)


class MicroBatch:
    """The context of `Engine.accumulate`: one micro-batch.

    This is a class because a generator would cost more time than the rest of the engine's step.
    """

    __slots__ = ("_accumulation", "_connected", "_exchanged", "_loaders")

    def __init__(self, accumulation: Accumulation, loaders: ActiveLoaders, connected: list[DataParallel]) -> None:
        self._accumulation = accumulation
        self._loaders = loaders
        self._connected = connected
        self._exchanged: list[DataParallel] = []

    def __enter__(self) -> None:
        loader = self._loaders.innermost
        if loader is None:
            self._accumulation.open_micro_batch(None, False)
        else:
            self._accumulation.open_micro_batch(loader.num_remaining, loader.end_of_epoch, loader.row_share)
        self._accumulation.inside = True
        # leave models inside an outer no_sync alone: they exchange no gradients, even at the end of a window
        self._exchanged = [model for model in self._connected if model.require_backward_grad_sync]
        for model in self._exchanged:
            model.require_backward_grad_sync = self._accumulation.exchanges

    def __exit__(self, *exception: object) -> None:
        self._accumulation.inside = False
        for model in self._exchanged:
            model.require_backward_grad_sync = True


def _checked_weight(weight: Weight, device: torch.device) -> Weight:
    """Return a CPU weight as a number, and any other as a scalar on the loss's device, without a host-device sync."""
    if isinstance(weight, torch.Tensor):
        if weight.numel() != 1:
            raise LossError(
                f"weight has shape {tuple(weight.shape)}, but must be one number: the rows or tokens in the loss",
                "weight=(labels != -100).sum()",
            )
        if weight.device.type != "cpu":
            return weight.detach().reshape(()).to(device=device, dtype=torch.float32)
    number = float(weight)
    if not math.isfinite(number) or number < 0:
        raise LossError(
            f"weight={number} is not valid", "pass the number of rows or tokens in the mean loss, such as len(labels)"
        )
    return number


def _none_if_weightless(contribution: torch.Tensor, weight: Weight) -> torch.Tensor | None:
    """Drop the loss of a micro-batch without labels, which may be NaN; device weights need no host-device sync."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, contribution, torch.zeros_like(contribution))
    return contribution if weight > 0 else None


def _ratio(weight: Weight, total: Weight, num_processes: int) -> Weight:
    """Return the factor of a window's only micro-batch; 0 if no process has a weight."""
    if isinstance(total, torch.Tensor):
        return weight * num_processes / total.clamp(min=torch.finfo(total.dtype).tiny)
    return weight * num_processes / total if total else 0.0


def _initial_expectation(weight: Weight, num_steps: int) -> Weight:
    """Return E: the first weight times the length of a window. Any value works, because `correction` divides it out."""
    if isinstance(weight, torch.Tensor):
        return torch.where(weight > 0, weight * num_steps, torch.full_like(weight, num_steps))
    return weight * num_steps if weight > 0 else float(num_steps)
