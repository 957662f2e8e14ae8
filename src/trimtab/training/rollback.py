"""Undo work on a model that ran out of memory: the gradients of a window, or a rehearsal.

Before the optimizer steps, a window changes gradients, random number generators and buffers of the model. All of them
are restored. The first window that succeeds shows which buffers and which generators of the host change at all; from
then on only these are saved beforehand, besides torch's own generators (5 kB on the host, 16 bytes per accelerator).
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from trimtab.engine.agreement import WindowAborted
from trimtab.engine.engine import Engine
from trimtab.hardware.memory import describe_failed_allocation, is_out_of_memory, release_cached_memory
from trimtab.model.gradient_hooks import call_when_hooks_run_out
from trimtab.optim.in_backward import updates_of
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
    """Memory ran out, and the work was undone."""

    wanted: str = ""  # the allocation that failed, if known
    is_elsewhere: bool = False  # memory ran out in another process
    is_too_late: bool = False  # other processes may have continued and cannot undo it
    has_changed_weights: bool = False  # weights were updated in backward, which cannot be undone

    def __str__(self) -> str:
        if self.is_elsewhere:
            return "out of memory in another process"
        return f"out of memory ({self.wanted} were needed)" if self.wanted else "out of memory"


class Rollback:
    """Run work on a prepared model, and undo it if memory runs out.

    Args:
        engine: The engine that prepared the model.
        model: The model.
        capture: Called when memory has run out, once in each attempt, before anything is freed or undone.
    """

    def __init__(self, engine: Engine, model: torch.nn.Module, capture: Callable[[], None] = lambda: None) -> None:
        self._engine, self._capture = engine, capture
        self._has_captured = False
        self._updates = updates_of(model)
        self._buffers = _ChangingBuffers(model)
        self._random = _UsedGenerators()

    def attempt(self, work: Callable[[], T], *, together: bool = False) -> T | OutOfMemory:
        """Return the result of `work`; if memory runs out, undo the work and return the failure.

        Args:
            work: Computes a window, or something that needs no other process.
            together: Whether it is a window of several processes: if one process undoes it, all do.
        """
        undo = self._undo_point()
        self._updates.has_changed_weights = self._has_captured = False
        window = self._engine.all_or_none_window() if together else nullcontext()
        try:
            with call_when_hooks_run_out(self._capture_once), window:
                result = work()
        except WindowAborted:
            failure = OutOfMemory(is_elsewhere=True)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            failure = OutOfMemory(describe_failed_allocation(error))
            self._capture_once()
        else:
            self._buffers.observe()
            self._random.observe()
            return result
        # not in the except block: while the exception is handled, its traceback keeps the activations alive
        if together:
            release_cached_memory(self._engine.device)
            failure = self._give_up(failure)
        undo()
        release_cached_memory(self._engine.device)
        return replace(failure, has_changed_weights=self._updates.has_changed_weights)

    def _capture_once(self) -> None:
        if not self._has_captured:
            self._has_captured = True
            self._capture()

    def _give_up(self, failure: OutOfMemory) -> OutOfMemory:
        try:
            is_too_late = not self._engine.abort_window()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            is_too_late = True
        return replace(failure, is_too_late=is_too_late)

    def rehearse(self, work: Callable[[], T]) -> T | OutOfMemory:
        """Run `work` and undo it in any case; return its result, or the failure if memory ran out."""
        undo = self._undo_point()
        with self._updates.held():
            result = self.attempt(work)
        undo()
        return result

    def _undo_point(self) -> Callable[[], None]:
        undo_gradients, random = self._engine.undo_point(), self._random.state()
        restore_buffers = self._buffers.undo_point()

        def undo() -> None:
            undo_gradients()
            restore_buffers()
            restore_random_state(random)

        return undo


class _UsedGenerators:
    """The random number generators that a window uses. Reading NumPy's takes 0.1 ms, and few models use it."""

    def __init__(self) -> None:
        self._uses_host: bool | None = None  # state of Python's or NumPy's generator; None until a window has succeeded
        self._before: RandomState = {}

    def state(self) -> RandomState:
        """Return the states to restore."""
        if self._uses_host is False:
            return torch_random_state()
        state = random_state()
        if self._uses_host is None:
            self._before = state
        return state

    def observe(self) -> None:
        """Find out, after a window has succeeded, which generators it used."""
        if self._uses_host is None:
            before, now = self._before, host_random_state()
            is_used = before["python"] != now["python"]
            if "numpy" in now:
                is_used |= "numpy" not in before or _plain(before["numpy"]) != _plain(now["numpy"])
            self._uses_host, self._before = is_used, {}


def _plain(numpy_state: Any) -> list[Any]:
    return [part.tolist() if hasattr(part, "tolist") else part for part in numpy_state]


class _ChangingBuffers:
    """The buffers of a model that a forward changes, such as running statistics. Few models have any.

    Until a window has succeeded, all buffers are copied, to the host.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._candidates = list(model.buffers())
        self._before: list[torch.Tensor] | None = []  # None once the buffers that change are known

    def observe(self) -> None:
        """Find out, after a window has succeeded, which buffers it changed."""
        if self._before is not None:
            # by value: on the CPU, batch norm changes its statistics without increasing torch's version counter
            pairs = zip(self._candidates, self._before, strict=True)
            self._candidates = [buffer for buffer, before in pairs if not torch.equal(buffer.cpu(), before)]
            self._before = None

    @torch.no_grad()
    def undo_point(self) -> Callable[[], None]:
        """Return a function that restores the current values."""
        if self._before is not None:
            values = self._before = [buffer.to("cpu", copy=True) for buffer in self._candidates]
        else:
            values = [buffer.clone() for buffer in self._candidates]
        saved = list(zip(self._candidates, values, strict=True))

        def undo() -> None:
            with torch.no_grad():
                for buffer, value in saved:
                    buffer.copy_(value)

        return undo
