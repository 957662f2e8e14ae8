"""Settings that Accelerate's constructor takes as objects, read by their fields: what they mean here, or why not.

Accelerate itself is not needed. A setting that would change something which the engine cannot do is refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import RecipeError
from trimtab.optim.scaling import LossScaler

_SCALER_FIELDS = ("init_scale", "growth_factor", "backoff_factor", "growth_interval")


@dataclass(frozen=True)
class Handlers:
    """What the objects in `kwargs_handlers` ask for."""

    scaler: dict[str, Any]
    profile: Any = None


def read_handlers(handlers: Sequence[Any] | None) -> Handlers:
    """GradScalerKwargs and ProfileKwargs are honoured; those of several processes mean nothing in one."""
    scaler: dict[str, Any] = {}
    profile = None
    for handler in handlers or ():
        if all(hasattr(handler, name) for name in _SCALER_FIELDS):
            if not getattr(handler, "enabled", True):
                raise RecipeError("GradScalerKwargs(enabled=False) is not supported", 'use mixed_precision="bf16"')
            scaler = {name: getattr(handler, name) for name in _SCALER_FIELDS}
        elif hasattr(handler, "build") and hasattr(handler, "activities"):
            profile = handler
        elif type(handler).__name__ not in ("DistributedDataParallelKwargs", "InitProcessGroupKwargs"):
            raise RecipeError(
                f"kwargs_handlers holds a {type(handler).__name__}, which is not supported",
                "GradScalerKwargs and ProfileKwargs are",
            )
    return Handlers(scaler, profile)


def check_loader_settings(config: Any, split_batches: bool | None) -> None:
    """Most of these divide batches among processes; with one process there is nothing to divide."""
    if getattr(config, "use_seedable_sampler", False):
        raise RecipeError(
            "use_seedable_sampler=True is not supported: it changes the order of the data",
            "leave it out and pass DataLoader(generator=…); the order is resumed exactly either way",
        )


def accumulation_steps(steps: int, plugin: Any) -> int:
    """The window's length, from the argument or from a GradientAccumulationPlugin."""
    if plugin is None:
        return steps
    if steps != 1:
        raise RecipeError("gradient_accumulation_steps and gradient_accumulation_plugin are both given", "pass one")
    for name, usual in (("sync_with_dataloader", True), ("sync_each_batch", False)):
        if getattr(plugin, name, usual) is not usual:
            raise RecipeError(f"gradient_accumulation_plugin.{name}={not usual} is not supported", f"{name}={usual}")
    return int(plugin.num_steps)


def project_folder(folder: str | Path | None, config: Any) -> Path | None:
    """Where trackers write, from the argument or from a ProjectConfiguration."""
    if getattr(config, "automatic_checkpoint_naming", False):
        raise RecipeError(
            "project_config.automatic_checkpoint_naming=True is not supported", "pass a folder to save_state"
        )
    if getattr(config, "total_limit", None) is not None:
        raise RecipeError("project_config.total_limit is not supported", "remove old folders of save_state yourself")
    chosen = folder if folder is not None else getattr(config, "project_dir", None)
    return None if chosen is None else Path(chosen)


def make_scaler(handlers: Handlers) -> LossScaler:
    """Loss scaling with the constants asked for."""
    return LossScaler(**handlers.scaler)
