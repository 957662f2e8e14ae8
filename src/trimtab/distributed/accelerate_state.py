"""Make Accelerate's own functions see the process group that the engine has created on CPUs.

`accelerate.utils.gather_object` and similar functions read Accelerate's `PartialState`, a singleton created at its
first use. On GPUs it finds torch's process group. On CPUs it looks for one only if it is created with cpu=True, as
`Accelerator(cpu=True)` does; if one of those functions creates it, it assumes a single process. So this module creates
the singleton as soon as both Accelerate is imported and the process group exists.
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

from trimtab.distributed.environment import RankInfo
from trimtab.log import logger

_MODULE = "accelerate.state"


def make_partial_state(place: RankInfo) -> None:
    """Create Accelerate's `PartialState` for the CPU process group, now or when Accelerate is imported."""
    if _MODULE in sys.modules:
        _make_state(sys.modules[_MODULE], place)
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(lambda module: _make_state(module, place)))


def _make_state(module: ModuleType, place: RankInfo) -> None:
    partial_state: Any = getattr(module, "PartialState", None)
    if partial_state is None:  # an unknown version of Accelerate, or a partially imported module
        return
    if not getattr(partial_state, "_shared_state", None):
        with _launch_variables(place):
            partial_state(cpu=True)
    num_processes = partial_state().num_processes
    if num_processes != dist.get_world_size():
        logger.warning(
            "Accelerate's PartialState was created for %d process before the Engine connected %d: functions of "
            "accelerate.utils, such as gather_object, use one process only. Create the Engine first.",
            num_processes,
            dist.get_world_size(),
        )


@contextmanager
def _launch_variables(place: RankInfo) -> Iterator[None]:
    """Set the environment variables that Accelerate reads, for any launcher; restore them on exit."""
    before = dict(os.environ)
    os.environ |= {
        "RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_RANK": str(place.local_rank),
        "LOCAL_WORLD_SIZE": str(place.local_world_size),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "localhost"),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),  # if unset, Accelerate changes the number of torch threads
    }
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class _AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that calls a function with Accelerate's module after its import, once."""

    def __init__(self, call: Callable[[ModuleType], None]) -> None:
        self._call = call
        self._loader: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders give, with this object as its loader."""
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module with its original loader."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its original loader, then call the function."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._call(module)
