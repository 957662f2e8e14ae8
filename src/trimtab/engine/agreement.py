"""Lets all processes end an accumulation window, or none.

Out of memory is an event of one process. The others learn of it at their next exchange with that process: before the
first values of a window are exchanged, or after its gradients were, to which the failed process contributes zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.accumulation import Accumulation, Weight


class WindowAborted(Exception):
    """Another process has aborted this window; so far it has changed gradients only."""


class _Stage(Enum):
    OFF = 0  # no agreement was requested
    OPEN = 1  # any process may abort
    EXCHANGING = 2  # gradients are being exchanged
    DONE = 3  # all processes have the gradients: too late to abort
    ABORTED = 4  # by another process


class Agreement:
    """The agreement of all processes on whether the current window ends.

    Args:
        world: The processes.
        connected: The models whose gradients they exchange; the list grows as models are prepared.
        accumulation: The current window.
    """

    def __init__(self, world: World, connected: list[DataParallel], accumulation: Accumulation) -> None:
        self._world, self._connected, self._accumulation = world, connected, accumulation
        self._stage = _Stage.OFF

    @contextmanager
    def required(self) -> Iterator[None]:
        """Make one window end on all processes or on none; after an exception inside, call `abort`."""
        self._stage = _Stage.OFF
        for model in self._connected:
            model.rewrap_if_trainable_changed()
        can_abort = bool(self._connected) and all(model.can_abandon_backward for model in self._connected)
        self._stage = _Stage.OPEN if can_abort else _Stage.OFF
        yield
        self._stage = _Stage.OFF

    def before_backward(self, weight: Weight | None) -> None:
        """If the next backward exchanges anything, ask first whether a process has aborted.

        Raises:
            WindowAborted: One has.
        """
        if self._stage is not _Stage.OPEN or not self._accumulation.needs_others(weight):
            return
        self._ask()
        if self._accumulation.sync:
            self._stage = _Stage.EXCHANGING
            for model in self._connected:
                model.mark_backward_start()

    def after_exchange(self) -> None:
        """After the gradients were exchanged, ask whether a process contributed zeros.

        Raises:
            WindowAborted: One did.
        """
        if self._stage is _Stage.EXCHANGING:
            self._stage = _Stage.OPEN
            self._ask()
            self._stage = _Stage.DONE

    def _ask(self) -> None:
        if self._world.anyone(False):
            self._stage = _Stage.ABORTED
            raise WindowAborted

    def abort(self) -> bool:
        """Abort the current window, after an error here or after `WindowAborted`.

        Returns:
            Whether all processes abort it. False if its gradients were already exchanged, or if the models do not
            support it.
        """
        stage, self._stage = self._stage, _Stage.OFF
        if stage in (_Stage.OFF, _Stage.DONE):
            return False
        if stage is not _Stage.ABORTED:
            self._accumulation.finish_pending_sum()
            if stage is _Stage.EXCHANGING:
                with self._world.exchanging("backward"):
                    for model in self._connected:
                        model.fill_missing_gradients()
            self._world.anyone(True)
        with self._world.exchanging("start over"):
            for model in self._connected:
                model.reset_reducer()
        return True
