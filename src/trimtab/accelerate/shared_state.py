"""`PartialState()`, `AcceleratorState()` and `GradientState()`: views of the latest `Accelerator`.

In Accelerate these are process-wide singletons. Here they are views of the most recently created `Accelerator`, or,
before one exists, of the processes found in the environment.
"""

import os
import weakref
from typing import Any

from trimtab.distributed.environment import read_rank_info
from trimtab.distributed.process_state import ProcessState
from trimtab.distributed.rendezvous import init_world
from trimtab.engine.accelerate_verbs import GradientState as _GradientView
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.engine import Engine
from trimtab.engine.prepared_loader import ActiveLoaders
from trimtab.hardware.inventory import find_device

_latest: weakref.ref[Engine] | None = None
_without_engine: ProcessState | None = None


def remember(engine: Engine) -> None:
    """Make this engine the latest one."""
    global _latest
    _latest = weakref.ref(engine)


def latest_engine() -> Engine | None:
    """Return the most recently created `Accelerator`, if it still exists."""
    return None if _latest is None else _latest()


def is_initialized() -> bool:
    """Whether an `Accelerator` exists."""
    return latest_engine() is not None


def forget() -> None:
    """Forget the latest engine."""
    global _latest, _without_engine
    _latest = _without_engine = None


class PartialState(ProcessState):
    """Information about the processes. Each call returns the same object until the next `Accelerator` is created."""

    def __new__(cls, cpu: bool = False, **kwargs: Any) -> ProcessState:  # type: ignore[misc]
        """Return the state of the latest `Accelerator`, or one read from the environment."""
        global _without_engine
        engine = latest_engine()
        if engine is not None:
            return engine.state
        if _without_engine is None:
            place = read_rank_info()
            use_cpu = cpu or is_set("ACCELERATE_USE_CPU")
            device = find_device("cpu" if use_cpu else None, place.local_device)
            _without_engine = ProcessState(init_world(place, device), device)
        return _without_engine

    @staticmethod
    def _reset_state(*args: Any, **kwargs: Any) -> None:
        """Make the next call read the environment again; existing engines do not change."""
        forget()


class AcceleratorState(PartialState):
    """The processes and the precision of the latest `Accelerator`."""


class GradientState:
    """The window and the epoch of the latest `Accelerator`."""

    def __new__(cls, gradient_accumulation_plugin: Any = None) -> _GradientView:  # type: ignore[misc]
        """Return the view."""
        engine = latest_engine()
        return _GradientView(Accumulation(1), ActiveLoaders()) if engine is None else engine.gradient_state

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: each engine has its own state."""


def is_set(name: str) -> bool:
    """Return whether an environment variable is true, in the spelling of `accelerate launch`."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y", "t")
