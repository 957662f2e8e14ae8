"""Makes all processes complete an accumulation window, or none.

One process alone may run out of memory. The others learn of it when they next exchange data with it: before the first
values of a window are exchanged, or after the gradients are, to which the failed process contributes zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.accumulation import Accumulation, Weight


class WindowAborted(Exception):
    """Another process has aborted this window; so far the window has changed only gradients."""


class _Stage(Enum):
    OFF = 0  # no agreement was requested
    OPEN = 1  # any process may abort
    EXCHANGING = 2  # gradients are being exchanged
    DONE = 3  # all processes have the gradients: too late to abort
    ABORTED = 4  # another process aborted


class Agreement:
    """The agreement of all processes on whether to complete the current window.

    Args:
        world: The processes.
        connected: The models whose gradients are exchanged; the list grows as models are prepared.
        accumulation: The current window.
    """

    def __init__(self, world: World, connected: list[DataParallel], accumulation: Accumulation) -> None:
        self._world, self._connected, self._accumulation = world, connected, accumulation
        self._stage = _Stage.OFF

    @contextmanager
    def required(self) -> Iterator[None]:
        """Make one window complete on all processes or on none; after an exception inside, call `abort`."""
        self._stage = _Stage.OFF
        for model in self._connected:
            model.rewrap_if_trainable_changed()
        can_abort = bool(self._connected) and all(model.can_abandon_backward for model in self._connected)
        self._stage = _Stage.OPEN if can_abort else _Stage.OFF
        yield
        self._stage = _Stage.OFF

    def before_backward(self, weight: Weight | None) -> None:
        """If the next backward exchanges anything, ask first whether any process has aborted.

        Raises:
            WindowAborted: A process has aborted.
        """
        if self._stage is not _Stage.OPEN or not self._accumulation.needs_others(weight):
            return
        self._ask()
        if self._accumulation.sync:
            self._stage = _Stage.EXCHANGING
            for model in self._connected:
                model.mark_backward_start()

    def after_exchange(self) -> None:
        """After the gradients were exchanged, ask whether any process contributed zeros.

        Raises:
            WindowAborted: A process contributed zeros.
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
