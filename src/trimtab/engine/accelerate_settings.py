"""Reads the settings objects of Accelerate's constructor by their fields.

Accelerate itself is not needed. A setting that the engine cannot honour raises an error with its name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.distributed.ddp import DataParallelOptions
from trimtab.engine.accumulation import WindowRules
from trimtab.engine.sharding import LoaderRules
from trimtab.errors import RecipeError
from trimtab.log import log_info_once

_SCALER_FIELDS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True)
class Handlers:
    """The settings in `kwargs_handlers`."""

    scaler: dict[str, Any]
    profile: Any = None
    data_parallel: DataParallelOptions = DataParallelOptions()
    timeout_s: float | None = None


def read_handlers(handlers: Sequence[Any] | None, find_unused_parameters: bool) -> Handlers:
    """Read GradScalerKwargs, ProfileKwargs, DistributedDataParallelKwargs and the timeout of InitProcessGroupKwargs."""
    scaler: dict[str, Any] = {}
    profile = None
    options = DataParallelOptions(find_unused_parameters=find_unused_parameters)
    timeout_s = None
    for handler in handlers or ():
        if all(hasattr(handler, name) for name in _SCALER_FIELDS):
            if not getattr(handler, "enabled", True):
                raise RecipeError("GradScalerKwargs(enabled=False) is not supported", 'mixed_precision="bf16"')
            scaler = {name: getattr(handler, name) for name in _SCALER_FIELDS}
        elif hasattr(handler, "build") and hasattr(handler, "activities"):
            profile = handler
        elif type(handler).__name__ == "DistributedDataParallelKwargs":
            options = _data_parallel(handler, find_unused_parameters)
        elif type(handler).__name__ == "InitProcessGroupKwargs":
            _require_defaults(handler, backend=(None, "nccl", "gloo"), init_method=(None,))
            timeout_s = None if handler.timeout is None else handler.timeout.total_seconds()
        elif type(handler).__name__ == "AutocastKwargs":
            _require_defaults(handler, enabled=(True,), cache_enabled=(None, True))
        else:
            raise RecipeError(
                f"kwargs_handlers contains a {type(handler).__name__}, which is not supported",
                "use GradScalerKwargs, ProfileKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs or "
                "AutocastKwargs",
            )
    return Handlers(scaler, profile, options, timeout_s)


def _data_parallel(handler: Any, find_unused_parameters: bool) -> DataParallelOptions:
    if str(getattr(handler, "comm_hook", "no")).lower() not in ("no", "ddpcommunicationhooktype.no"):
        raise RecipeError("DistributedDataParallelKwargs.comm_hook is not supported", "leave it out")
    # gradients are always views of buckets, and buffers that change are always broadcast
    _require_defaults(handler, dim=(0,), broadcast_buffers=(True,), check_reduction=(False,), comm_wrapper=("no",))
    return DataParallelOptions(
        bucket_cap_mb=handler.bucket_cap_mb,
        find_unused_parameters=find_unused_parameters or handler.find_unused_parameters,
        static_graph=handler.static_graph,
    )


def _require_defaults(handler: Any, **defaults: tuple[Any, ...]) -> None:
    """Raise an error if a field has a value that is not allowed: no setting is ignored silently."""
    for name, allowed in defaults.items():
        value = getattr(handler, name, allowed[0])
        if value not in allowed and getattr(value, "value", value) not in allowed:
            raise RecipeError(f"{type(handler).__name__}.{name}={value!r} is not supported", "leave it out")


def loader_rules(config: Any, split_batches: bool | None, as_accelerate: bool = False) -> LoaderRules:
    """Return how loaders are divided among processes.

    A DataLoaderConfiguration has Accelerate's meaning: unless it has split_batches=True, each process takes its own
    batches. With neither a configuration nor the argument, the batch size counts the rows of all processes.

    Args:
        config: A DataLoaderConfiguration, or None.
        split_batches: The argument of the engine; takes precedence over `config`.
        as_accelerate: Whether to divide batches as Accelerate does, with its defaults.
    """
    if config is not None and not hasattr(config, "split_batches"):
        raise RecipeError(
            f"dataloader_config is a {type(config).__name__}, not a DataLoaderConfiguration",
            "dataloader_config=DataLoaderConfiguration(split_batches=…)",
        )
    if split_batches is None:
        split_batches = bool(getattr(config, "split_batches", not as_accelerate))
    dispatches = getattr(config, "dispatch_batches", None)
    return LoaderRules(
        splits=split_batches,
        as_accelerate=as_accelerate,
        is_even=bool(getattr(config, "even_batches", True)),
        dispatches=dispatches if dispatches is not None or as_accelerate else False,
        is_seedable=bool(getattr(config, "use_seedable_sampler", False)),
        data_seed=getattr(config, "data_seed", None),
    )


def accumulation_rules(steps: int, plugin: Any, as_accelerate: bool = False) -> tuple[int, WindowRules]:
    """Return the length of a window, from the argument or from a GradientAccumulationPlugin, and its rules."""
    if plugin is None:
        return steps, WindowRules(divides_by_num_steps=as_accelerate)
    if steps != 1:
        raise RecipeError(
            "gradient_accumulation_steps and gradient_accumulation_plugin are both given", "leave one of them out"
        )
    rules = WindowRules(
        ends_with_epoch=bool(getattr(plugin, "sync_with_dataloader", True)),
        exchanges_each=bool(getattr(plugin, "sync_each_batch", False)),
        divides_by_num_steps=as_accelerate,
    )
    return int(plugin.num_steps or 1), rules


def project_folders(
    folder: str | Path | None, config: Any, as_accelerate: bool = False
) -> tuple[Path | None, Path | None]:
    """Return the project's folder and the one that trackers write to, from the argument or a ProjectConfiguration."""
    names_folders = bool(getattr(config, "automatic_checkpoint_naming", False))
    if names_folders and not as_accelerate:
        raise RecipeError(
            "project_config.automatic_checkpoint_naming=True is not supported", "pass a folder to save_state"
        )
    if config is not None:
        _require_defaults(config, save_on_each_node=(False,))
    if getattr(config, "total_limit", None) is not None and not names_folders:
        if not as_accelerate:
            raise RecipeError(
                "project_config.total_limit is not supported", "delete old folders of save_state yourself"
            )
        log_info_once("project_config.total_limit applies to automatic_checkpoint_naming=True only, as in Accelerate")
    chosen = folder if folder is not None else getattr(config, "project_dir", None)
    logs = getattr(config, "logging_dir", None) or chosen
    chosen = chosen if chosen is not None else logs
    return None if chosen is None else Path(chosen), None if logs is None else Path(logs)
