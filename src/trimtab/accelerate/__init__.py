"""Drop-in replacement for Accelerate: scripts change only their import lines.

`from accelerate import …` becomes `from trimtab.accelerate import …`. The submodules that scripts import from, such as
`accelerate.utils`, `accelerate.state` and `accelerate.logging`, are aliases of this module. docs/accelerate.md lists
every method and argument, and the differences.
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
from trimtab.accelerate.loaders import prepare_data_loader, skip_first_batches
from trimtab.accelerate.logger import MultiProcessAdapter, get_logger
from trimtab.accelerate.notebook import notebook_launcher
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
)
from trimtab.accelerate.random_state import set_seed, synchronize_rng_state, synchronize_rng_states
from trimtab.accelerate.shared_state import AcceleratorState, GradientState, PartialState
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
    """Import functions such as `is_xpu_available` from Accelerate; any other name raises an error with a suggestion."""
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{__name__}.{name}" in sys.modules:  # such as `trimtab.accelerate.utils`, an alias of this module
        return sys.modules[f"{__name__}.{name}"]
    if find_spec("accelerate") is not None:
        theirs = import_module("accelerate.utils")
        if name.startswith("is_") and hasattr(theirs, name):
            return getattr(theirs, name)
    # `from … import NAME` shows the message of an ImportError only; `hasattr` needs an AttributeError
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(
        f"trimtab.accelerate has no {name}\n  cure: if it is not part of training, import it from accelerate "
        "(pip install accelerate); docs/accelerate.md lists the supported names"
    )


for _name in (
    *("accelerator", "data_loader", "launchers", "logging", "memory_utils", "optimizer", "scheduler", "state", "utils"),
    *(f"utils.{part}" for part in ("dataclasses", "memory", "operations", "other", "random")),
):
    sys.modules.setdefault(f"{__name__}.{_name}", sys.modules[__name__])
