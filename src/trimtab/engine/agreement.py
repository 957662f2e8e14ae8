"""Processes end a window of gradients together, or not at all.

Running out of memory is an event of one host. The others hear of it where they need that process the next time: before
the first numbers of a window are exchanged, or after its gradients were, for which it then answers with zeros.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.world import World
from trimtab.engine.accumulation import Accumulation, Weight


class OthersGaveUp(Exception):
    """Another process cannot end this window; nothing has been changed by it yet but gradients."""


class _Stage(Enum):
    """How far processes have agreed that a window's gradients are there."""

    NONE = 0  # not asked for
    SOUGHT = 1
    EXCHANGING = 2  # gradients are on their way
    REACHED = 3
    REFUSED = 4  # by another process


class Agreement:
    """What the processes of a run know of each other's window.

    Args:
        world: The processes.
        connected: The models whose gradients they exchange; it grows as models are prepared.
        accumulation: The current window.
    """

    def __init__(self, world: World, connected: list[DataParallel], accumulation: Accumulation) -> None:
        self._world, self._connected, self._accumulation = world, connected, accumulation
        self._stage = _Stage.NONE

    @contextmanager
    def sought(self) -> Iterator[None]:
        """A context for one window that processes end together, or not at all; where it fails, `give_up` comes next."""
        self._stage = _Stage.NONE
        for model in self._connected:
            model.follow_what_trains()
        can_give_up = bool(self._connected) and all(model.can_give_up for model in self._connected)
        self._stage = _Stage.SOUGHT if can_give_up else _Stage.NONE
        yield
        self._stage = _Stage.NONE

    def before_backward(self, weight: Weight | None) -> None:
        """A backward comes. If it needs the others, ask whether all are there.

        Raises:
            OthersGaveUp: One is not.
        """
        if self._stage is not _Stage.SOUGHT or not self._accumulation.needs_others(weight):
            return
        self._ask()
        if self._accumulation.sync:
            self._stage = _Stage.EXCHANGING
            for model in self._connected:
                model.begin_exchange()

    def after_exchange(self) -> None:
        """Gradients were exchanged here: ask whether they were everywhere.

        Raises:
            OthersGaveUp: One process answered with zeros.
        """
        if self._stage is _Stage.EXCHANGING:
            self._stage = _Stage.SOUGHT
            self._ask()
            self._stage = _Stage.REACHED

    def _ask(self) -> None:
        if self._world.anyone(False):
            self._stage = _Stage.REFUSED
            raise OthersGaveUp

    def give_up(self) -> bool:
        """This process cannot end the window that it is in, or has heard that another cannot.

        Returns:
            Whether all give up: not where the window's gradients had been exchanged, or where the models do not allow
            it.
        """
        stage, self._stage = self._stage, _Stage.NONE
        if stage in (_Stage.NONE, _Stage.REACHED):
            return False
        if stage is not _Stage.REFUSED:
            self._accumulation.settle()
            if stage is _Stage.EXCHANGING:
                with self._world.exchanging("backward"):
                    for model in self._connected:
                        model.give_up_exchange()
            self._world.anyone(True)
        with self._world.exchanging("start over"):
            for model in self._connected:
                model.start_over()
        return True
