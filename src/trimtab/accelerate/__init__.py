"""Accelerate's names, for scripts that change nothing but their import lines.

`from accelerate import …` becomes `from trimtab.accelerate import …`, and so do `accelerate.utils`, `accelerate.state`,
`accelerate.logging` and the other modules that scripts import from: they all are this module. docs/accelerate.md lists
every verb and argument, and what is different.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from trimtab.accelerate.batch_size import find_executable_batch_size, release_memory
from trimtab.accelerate.configuration import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    ProjectConfiguration,
)
from trimtab.accelerate.drop_in import Accelerator
from trimtab.accelerate.latest import AcceleratorState, GradientState, PartialState
from trimtab.accelerate.launching import notebook_launcher
from trimtab.accelerate.loaders import prepare_data_loader, skip_first_batches
from trimtab.accelerate.logger import MultiProcessAdapter, get_logger
from trimtab.accelerate.operations import (
    DistributedOperationException,
    broadcast,
    broadcast_object_list,
    concatenate,
    copy_tensor_to_devices,
    extract_model_from_parallel,
    gather,
    gather_object,
    pad_across_processes,
    reduce,
    send_to_device,
    synchronize_rng_state,
    synchronize_rng_states,
)
from trimtab.accelerate.seeding import set_seed
from trimtab.distributed.world import DistributedType
from trimtab.engine.dispatched_loader import DispatchedLoader as DataLoaderDispatcher
from trimtab.engine.prepared_loader import PreparedLoader as DataLoaderShard
from trimtab.engine.prepared_optimizer import PreparedOptimizer as AcceleratedOptimizer
from trimtab.engine.prepared_optimizer import PreparedScheduler as AcceleratedScheduler
from trimtab.engine.seedable_samplers import SeedableRandomSampler

__all__ = [
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AcceleratorState",
    "DataLoaderConfiguration",
    "DataLoaderDispatcher",
    "DataLoaderShard",
    "DistributedDataParallelKwargs",
    "DistributedOperationException",
    "DistributedType",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "GradientState",
    "InitProcessGroupKwargs",
    "MultiProcessAdapter",
    "PartialState",
    "ProfileKwargs",
    "ProjectConfiguration",
    "SeedableRandomSampler",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "copy_tensor_to_devices",
    "extract_model_from_parallel",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "get_logger",
    "notebook_launcher",
    "pad_across_processes",
    "prepare_data_loader",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_state",
    "synchronize_rng_states",
]


def __getattr__(name: str) -> Any:
    """Questions such as `is_xpu_available` are answered by Accelerate; other names there are not, and why."""
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{__name__}.{name}" in sys.modules:  # `trimtab.accelerate.utils`, which is this module
        return sys.modules[f"{__name__}.{name}"]
    if find_spec("accelerate") is not None:
        theirs = import_module("accelerate.utils")
        if name.startswith("is_") and hasattr(theirs, name):
            return getattr(theirs, name)
    # `from … import NAME` shows the words of an ImportError alone; `hasattr` understands an AttributeError alone
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(
        f"trimtab.accelerate has no {name}\n  cure: what does not train can still come from Accelerate itself "
        f"(pip install accelerate); docs/accelerate.md lists what is here"
    )


for _name in (
    *("accelerator", "data_loader", "launchers", "logging", "memory_utils", "optimizer", "scheduler", "state", "utils"),
    *(f"utils.{part}" for part in ("dataclasses", "memory", "operations", "other", "random")),
):
    sys.modules.setdefault(f"{__name__}.{_name}", sys.modules[__name__])
