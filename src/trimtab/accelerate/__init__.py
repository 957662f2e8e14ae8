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
    AutocastKwargs,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    LoggerType,
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
    is_peft_model,
    pad_across_processes,
    patch_environment,
    reduce,
    send_to_device,
    tqdm,
)
from trimtab.accelerate.random_state import set_seed, synchronize_rng_state, synchronize_rng_states
from trimtab.accelerate.shared_state import AcceleratorState, GradientState, PartialState, is_initialized
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
    "AutocastKwargs",
    "DDPCommunicationHookType",
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
    "LoggerType",
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
    "is_initialized",
    "is_peft_model",
    "notebook_launcher",
    "pad_across_processes",
    "patch_environment",
    "prepare_data_loader",
    "reduce",
    "release_memory",
    "send_to_device",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
]


__version__ = "1.15.0"  # of Accelerate, whose interface this is; scripts compare it

# Names that have nothing to do with the training loop, or belong to settings that `Accelerator` refuses by name.
_FROM_ACCELERATE = (
    *("accelerate", "accelerate.utils", "accelerate.hooks", "accelerate.utils.fsdp_utils"),
    *("accelerate.commands.config", "accelerate.commands.launch"),
)
_UNRELATED = (
    *("AlignDevicesHook", "CpuOffload", "DeepSpeedPlugin"),
    *("FullyShardedDataParallelPlugin", "MegatronLMPlugin", "ParallelismConfig", "TorchDynamoPlugin"),
    *("compute_module_sizes", "cpu_offload", "cpu_offload_with_hook", "default_config_file", "disk_offload"),
    *("dispatch_model", "find_tied_parameters", "get_balanced_memory", "get_max_memory", "get_parameters_from_modules"),
    *("infer_auto_device_map", "init_empty_weights", "init_on_device", "launch_command", "launch_command_parser"),
    *("load_checkpoint_and_dispatch", "load_checkpoint_in_model", "load_config_from_file", "remove_hook_from_module"),
    *("set_module_tensor_to_device", "write_basic_config"),
)
_REPLACED = {
    "DummyOptim": "use an optimizer: DeepSpeed is not supported",
    "DummyScheduler": "use a scheduler: DeepSpeed is not supported",
    "LocalSGD": "use Accelerator(gradient_accumulation_steps=…), which exchanges gradients once per window",
    "PrepareForLaunch": "use notebook_launcher(function, args, num_processes=…)",
    "debug_launcher": "use notebook_launcher(function, args, num_processes=2)",
    "GeneralTracker": "pass an object with start, log and finish as log_with; see docs/tracking.md",
}


def __getattr__(name: str) -> Any:
    """Import what is not part of training from Accelerate; any other name raises an error with a suggestion."""
    if name.startswith("__"):
        raise AttributeError(name)
    if f"{__name__}.{name}" in sys.modules:  # such as `trimtab.accelerate.utils`, an alias of this module
        return sys.modules[f"{__name__}.{name}"]
    if (name in _UNRELATED or name.startswith("is_")) and find_spec("accelerate") is not None:
        for module in _FROM_ACCELERATE:
            if hasattr(import_module(module), name):
                return getattr(import_module(module), name)
    # `from … import NAME` shows the message of an ImportError only; `hasattr` needs an AttributeError
    is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"
    raise (ImportError if is_import else AttributeError)(
        f"trimtab.accelerate has no {name}\n  cure: "
        + _REPLACED.get(
            name,
            "if it is not part of training, import it from accelerate (pip install accelerate); docs/accelerate.md "
            "lists the supported names",
        )
    )


for _name in (
    *("accelerator", "big_modeling", "commands", "data_loader", "hooks", "launchers", "local_sgd", "logging"),
    *("memory_utils", "optimizer", "scheduler", "state", "tracking", "utils"),
    *("commands.config", "commands.launch"),
    *(f"utils.{part}" for part in ("dataclasses", "environment", "fsdp_utils", "imports", "launch", "memory")),
    *(f"utils.{part}" for part in ("modeling", "operations", "other", "random", "tqdm", "versions")),
):
    sys.modules.setdefault(f"{__name__}.{_name}", sys.modules[__name__])
