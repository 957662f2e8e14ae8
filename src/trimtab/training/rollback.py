"""Work that leaves no trace where memory runs out: a window's gradients, or a rehearsal of them.

What a window changes before the optimizer steps is gradients, random numbers and buffers of the model; each is put
back. The first window that is done shows which buffers and generators of the host change at all; from then on only
these are noted beforehand, beside torch's own generators (5 kB on the host, and 16 bytes for each accelerator).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from trimtab.engine.agreement import OthersGaveUp
from trimtab.engine.engine import Engine
from trimtab.hardware.memory import is_out_of_memory, release_cached_memory, wanted_words
from trimtab.randomness import (
    RandomState,
    host_random_state,
    random_state,
    restore_random_state,
    torch_random_state,
)

T = TypeVar("T")


@dataclass(frozen=True)
class OutOfMemory:
    """Memory ran out, and everything is as it was before."""

    wanted: str = ""  # what was asked for in vain, if that is known
    is_elsewhere: bool = False  # on another process
    is_too_late: bool = False  # other processes may have gone on

    def __str__(self) -> str:
        if self.is_elsewhere:
            return "out of memory on another process"
        return f"out of memory ({self.wanted} were needed)" if self.wanted else "out of memory"


class Transaction:
    """Does work on a model, and undoes it.

    Args:
        engine: The engine that prepared the model.
        model: The prepared model.
    """

    def __init__(self, engine: Engine, model: torch.nn.Module) -> None:
        self._engine = engine
        self._buffers = _ChangingBuffers(model)
        self._random = _DrawnGenerators()

    def attempt(self, work: Callable[[], T], *, together: bool = False) -> T | OutOfMemory:
        """What `work` gives; or, where memory ran out in it, that, and everything as it was before.

        Args:
            work: A window, or something that needs no other process.
            together: Whether it is a window of several processes: if one takes it back, all do.
        """
        undo = self._undo_point()
        try:
            with self._engine.agreeing() if together else nullcontext():
                result = work()
        except OthersGaveUp:
            failure = OutOfMemory(is_elsewhere=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = OutOfMemory(wanted_words(error))
        else:
            self._buffers.seen()
            self._random.seen()
            return result
        # here and not above: as long as the exception is handled, its traceback holds the activations
        if together:
            release_cached_memory(self._engine.device)
            failure = self._give_up(failure)
        undo()
        release_cached_memory(self._engine.device)
        return failure

    def _give_up(self, failure: OutOfMemory) -> OutOfMemory:
        try:
            is_too_late = not self._engine.give_up_window()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            is_too_late = True
        return replace(failure, is_too_late=is_too_late)

    def rehearse(self, work: Callable[[], T]) -> T | OutOfMemory:
        """What `work` gives, or that memory ran out in it; everything is as it was before in any case."""
        undo = self._undo_point()
        result = self.attempt(work)
        undo()
        return result

    def _undo_point(self) -> Callable[[], None]:
        undo_gradients, random = self._engine.undo_point(), self._random.state()
        put_buffers_back = self._buffers.undo_point()

        def undo() -> None:
            undo_gradients()
            put_buffers_back()
            restore_random_state(random)

        return undo


class _DrawnGenerators:
    """The random number generators that a window draws from. Reading NumPy's takes 0.1 ms, and few models need it."""

    def __init__(self) -> None:
        self._host_is_drawn: bool | None = None  # Python's or NumPy's; None as long as no window was done
        self._before: RandomState = {}

    def state(self) -> RandomState:
        """What to put back."""
        if self._host_is_drawn is False:
            return torch_random_state()
        state = random_state()
        if self._host_is_drawn is None:
            self._before = state
        return state

    def seen(self) -> None:
        """A window was done."""
        if self._host_is_drawn is None:
            before, now = self._before, host_random_state()
            is_drawn = before["python"] != now["python"]
            if "numpy" in now:
                is_drawn |= "numpy" not in before or _plain(before["numpy"]) != _plain(now["numpy"])
            self._host_is_drawn, self._before = is_drawn, {}


def _plain(numpy_state: Any) -> list[Any]:
    return [part.tolist() if hasattr(part, "tolist") else part for part in numpy_state]


class _ChangingBuffers:
    """The buffers of a model that a forward changes, such as running statistics: few models have any.

    Until a window was done all are copied, to the host.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._candidates = list(model.buffers())
        self._before: list[torch.Tensor] | None = []  # a window that tells; None once it is known

    def seen(self) -> None:
        """A window was done."""
        if self._before is not None:
            # by their values: batch norm on the CPU changes its statistics behind the back of torch's version counter
            pairs = zip(self._candidates, self._before, strict=True)
            self._candidates = [buffer for buffer, before in pairs if not torch.equal(buffer.cpu(), before)]
            self._before = None

    @torch.no_grad()
    def undo_point(self) -> Callable[[], None]:
        """A function that puts the values of now back."""
        if self._before is not None:
            values = self._before = [buffer.to("cpu", copy=True) for buffer in self._candidates]
        else:
            values = [buffer.clone() for buffer in self._candidates]
        noted = list(zip(self._candidates, values, strict=True))

        def undo() -> None:
            with torch.no_grad():
                for buffer, value in noted:
                    buffer.copy_(value)

        return undo
