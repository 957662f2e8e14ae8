"""Lets Accelerate's functions see the processes that the engine has connected.

`accelerate.utils.gather_object` and its like ask Accelerate's `PartialState`, one object for the whole process, made at
its first use. On GPUs it finds torch's process group by itself. On CPUs it looks for one only if it is made with
cpu=True, as `Accelerator(cpu=True)` does; made by one of those functions it takes its process for the only one. So it
is made here, as soon as both Accelerate and the process group are there.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from trimtab.distributed.environment import Place
from trimtab.log import logger

_MODULE = "accelerate.state"


def tell_accelerate(place: Place) -> None:
    """Let Accelerate know of the CPU processes that are connected: now, or when it is imported."""
    if _MODULE in sys.modules:
        _make_state(sys.modules[_MODULE], place)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(lambda module: _make_state(module, place)))


def _make_state(module: ModuleType, place: Place) -> None:
    partial_state: Any = getattr(module, "PartialState", None)
    if partial_state is None:  # another version, or it is being imported at this moment
        return
    if not getattr(partial_state, "_shared_state", None):
        with _as_accelerate_reads(place):
            partial_state(cpu=True)
    known = partial_state().num_processes
    if known != dist.get_world_size():
        logger.warning(
            "Accelerate's PartialState was made for %d process before the Engine connected %d: functions of "
            "accelerate.utils, such as gather_object, see one process only. Make the Engine first.",
            known,
            dist.get_world_size(),
        )


@contextmanager
def _as_accelerate_reads(place: Place) -> Iterator[None]:
    """Variables that Accelerate reads, whatever started the processes; what it changes in them is taken back."""
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.num_local),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # where it is not set, Accelerate sets torch's threads
    }
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Calls a function with Accelerate's module once that has been imported, and is gone then."""

    def __init__(self, call: Callable[[ModuleType], None]) -> None:
        self._call = call
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module as the other finders find it, loaded by this one."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The loader's own."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The loader's own, and the call."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call(module)
