"""`Accelerator`: an engine with Accelerate's defaults, for scripts that change only their import line."""

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from trimtab.accelerate.configuration import ProjectConfiguration
from trimtab.accelerate.shared_state import is_set, remember
from trimtab.accelerate.state_folders import (
    Hooks,
    checkpoint_in,
    folder_with_hooks,
    next_folder,
    numbered_folders,
    registered,
)
from trimtab.engine.engine import Engine
from trimtab.engine.loss_scaler import Scaler
from trimtab.engine.prepared_loader import PreparedLoader
from trimtab.engine.prepared_optimizer import PreparedOptimizer
from trimtab.engine.prepared_parts import unwrap
from trimtab.errors import RecipeError

_SAVE_MEMORY = "leave it out; Engine(memory_budget=…) saves memory instead"
_DATA_PARALLEL = "leave it out: processes are data parallel only"
_COMPILE = "leave it out; pass compile_blocks=True, or call torch.compile(model) before prepare"
_CURES = {
    "deepspeed_plugin": _SAVE_MEMORY,
    "deepspeed_plugins": _SAVE_MEMORY,
    "fsdp_plugin": _SAVE_MEMORY,
    "megatron_lm_plugin": _DATA_PARALLEL,
    "torch_tp_plugin": _DATA_PARALLEL,
    "parallelism_config": _DATA_PARALLEL,
    "dynamo_backend": _COMPILE,
    "dynamo_plugin": _COMPILE,
}
_LAUNCHED_WITH = {
    "ACCELERATE_USE_DEEPSPEED": "run accelerate launch without --use_deepspeed",
    "ACCELERATE_USE_FSDP": "run accelerate launch without --use_fsdp",
    "ACCELERATE_USE_MEGATRON_LM": "run accelerate launch without --use_megatron_lm",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "run accelerate launch without --use_parallelism_config",
}


class Accelerator(Engine):
    """An engine that behaves like Accelerate's `Accelerator`, on any number of processes.

    It differs from `trimtab.Engine`, which has the same methods, in these defaults:

    - The batch size of a loader is that of one process, and schedulers step once per process.
    - The last batches of an epoch are padded with its first rows.
    - An accumulation window that is cut short by the end of an epoch is divided by the full length.
    - All processes draw the same random numbers after the same seed.

    The arguments are Accelerate's; see `Engine` for their meaning. Plugins for other kinds of parallelism, any dynamo
    backend except "no", and any rng_types except ["generator"] raise an error. `mixed_precision` and
    `gradient_accumulation_steps` default to the values passed to `accelerate launch`. `options` are arguments of
    `Engine` that Accelerate does not have: device, seed, find_unused_parameters, memory_budget, compile_blocks,
    cuda_graphs.
    """

    _as_accelerate = True

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: Any = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: Any = None,
        deepspeed_plugin: Any = None,
        fsdp_plugin: Any = None,
        torch_tp_plugin: Any = None,
        megatron_lm_plugin: Any = None,
        rng_types: Sequence[Any] | None = None,
        log_with: Any = None,
        project_dir: str | Path | None = None,
        project_config: Any = None,
        gradient_accumulation_plugin: Any = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[Any] | None = None,
        dynamo_backend: Any = None,
        dynamo_plugin: Any = None,
        deepspeed_plugins: Any = None,
        parallelism_config: Any = None,
        **options: Any,
    ) -> None:
        _refuse(
            deepspeed_plugin=deepspeed_plugin,
            deepspeed_plugins=deepspeed_plugins,
            fsdp_plugin=fsdp_plugin,
            torch_tp_plugin=torch_tp_plugin,
            megatron_lm_plugin=megatron_lm_plugin,
            parallelism_config=parallelism_config,
            dynamo_backend=None if str(dynamo_backend).lower().endswith("no") else dynamo_backend,
            dynamo_plugin=dynamo_plugin,
        )
        if rng_types is not None and {str(getattr(kind, "value", kind)) for kind in rng_types} - {"generator"}:
            raise RecipeError(
                f"rng_types={list(rng_types)} is not supported",
                'leave it out, and call synchronize_rng_states(["torch"]) where processes should draw the same numbers',
            )
        if gradient_accumulation_plugin is None:
            launched = os.environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
            gradient_accumulation_steps = gradient_accumulation_steps if launched is None else int(launched)
        super().__init__(
            _precision(mixed_precision),
            gradient_accumulation_steps,
            cpu=cpu or is_set("ACCELERATE_USE_CPU"),
            device_placement=device_placement,
            split_batches=split_batches,
            dataloader_config=dataloader_config,
            log_with=log_with,
            project_dir=project_dir,
            project_config=project_config,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            step_scheduler_with_optimizer=step_scheduler_with_optimizer,
            kwargs_handlers=kwargs_handlers,
            **options,
        )
        self.project_configuration = project_config or ProjectConfiguration(project_dir)
        self._save_hooks: Hooks = OrderedDict()
        self._load_hooks: Hooks = OrderedDict()
        remember(self)

    @property
    def native_amp(self) -> bool:
        """Whether models compute in half precision; False, set before `prepare`, turns that off."""
        return self._precision.compute_dtype is not None

    @native_amp.setter
    def native_amp(self, value: bool) -> None:
        if not value:
            self._precision.compute_dtype = None

    @property
    def scaler(self) -> Scaler | None:  # type: ignore[override]
        """The loss scaler for fp16; None in other precisions. `.grad` is unscaled after every backward."""
        return self._scaler if self._scaler.is_scaling else None

    # The methods below have arguments that Accelerate has and the engine does not.

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model; `evaluation_mode` requires a model without trainable parameters."""
        if evaluation_mode and any(parameter.requires_grad for parameter in model.parameters()):
            raise RecipeError(
                "prepare_model(evaluation_mode=True) is not supported for a model with trainable parameters",
                "call model.requires_grad_(False) first: a frozen model is not wrapped in DDP",
            )
        prepared: torch.nn.Module = self.prepare(model, device_placement=_listed(device_placement))
        return prepared

    def prepare_data_loader(
        self, loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None
    ) -> PreparedLoader:
        """Prepare one loader."""
        if slice_fn_for_dispatch is not None:
            raise RecipeError("slice_fn_for_dispatch is not supported", "leave it out: tensors are divided by rows")
        prepared: PreparedLoader = self.prepare(loader, device_placement=_listed(device_placement))
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> PreparedOptimizer:
        """Prepare one optimizer."""
        return super().prepare_optimizer(optimizer)

    def _own_models(self) -> list[torch.nn.Module]:
        """Return the models as hooks get them: without wrappers."""
        return [unwrap(model) for model in self._models]

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, weights, folder)` in `save_state`; weights that it removes are saved anyway."""
        return registered(self._save_hooks, hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> RemovableHandle:
        """Call `hook(models, folder)` in `load_state`, before everything that `save_state` wrote is loaded."""
        return registered(self._load_hooks, hook)

    @property
    def save_iteration(self) -> int:
        """The number of the next folder of `automatic_checkpoint_naming`."""
        return int(self.project_configuration.iteration)

    def save_state(self, output_dir: str | Path | None = None, safe_serialization: bool = True) -> str:
        """Write the state to a folder.

        Gradients of an open accumulation window are saved if all processes have the same. They are dropped if the
        script then returns to the start of the window with `skip_first_batches`. If only the main process calls this,
        the other processes resume with its random state.
        """
        _refuse_unless(safe_serialization, "save_state(safe_serialization=False)", "leave it out")
        config = self.project_configuration
        if config.automatic_checkpoint_naming:
            output_dir = next_folder(config, self.project_dir, self.is_main_process)
        if output_dir is None:
            raise RecipeError(
                "save_state() without a folder is not supported", "pass one: accelerator.save_state(FOLDER)"
            )
        same = self.num_processes == 1 or self._gradients.are_same_everywhere
        with (
            nullcontext() if same else self._gradients.window_set_aside(),
            folder_with_hooks(self._save_hooks, self._own_models(), Path(output_dir), self.is_main_process) as folder,
        ):
            self._saved_state.save(folder, may_be_alone=True)
        config.iteration += 1
        return str(output_dir)

    def load_state(self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None) -> None:
        """Load what `save_state` wrote."""
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            input_dir = next(reversed(numbered_folders(self.project_dir)), None)
        if input_dir is None:
            raise RecipeError(
                "load_state() without a folder is not supported", "pass one: accelerator.load_state(FOLDER)"
            )
        _refuse_unless(not load_kwargs, "load_state(load_kwargs=…)", "leave it out")
        models = self._own_models()
        for hook in self._load_hooks.values():
            hook(models, str(input_dir))
        super().load_state(checkpoint_in(Path(input_dir)) if isinstance(input_dir, str | Path) else input_dir)

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | Path,
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Write a model's weights to one safetensors file."""
        _refuse_unless(max_shard_size == "10GB", f"save_model(max_shard_size={max_shard_size!r})", "leave it out")
        cure = "use accelerator.save(accelerator.get_state_dict(model), FILE)"
        _refuse_unless(safe_serialization, "save_model(safe_serialization=False)", cure)
        super().save_model(model, save_directory)

    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = False
    ) -> torch.nn.Module:
        """Return the model without wrappers; `keep_torch_compile` keeps the wrapper of torch.compile."""
        if keep_torch_compile and "_orig_mod" in model._modules:
            return model
        return super().unwrap_model(model, keep_fp32_wrapper)

    def autocast(self, enabled: Any = True, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        """Return an autocast context in the engine's precision; an AutocastKwargs can disable it."""
        handler = autocast_handler if autocast_handler is not None else enabled
        return super().autocast(bool(getattr(handler, "enabled", handler)))

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return the tracker with that name; `unwrap` returns the object that it writes to, TensorBoard's writer."""
        tracker = super().get_tracker(name)
        cure = "use the tracker itself; for MLflow, mlflow.MlflowClient() with the run's ID"
        _refuse_unless(not unwrap or hasattr(tracker, "tracker"), f"get_tracker({name!r}, unwrap=True)", cure)
        return tracker.tracker if unwrap else tracker


def _listed(device_placement: bool | None) -> list[bool] | None:
    return None if device_placement is None else [device_placement]


def _refuse_unless(is_usual: bool, what: str, cure: str) -> None:
    if not is_usual:
        raise RecipeError(f"{what} is not supported", cure)


def _precision(asked: Any) -> str:
    """Return the argument, or the value that `accelerate launch` set in the environment."""
    value = os.environ.get("ACCELERATE_MIXED_PRECISION", "no") if asked is None else getattr(asked, "value", asked)
    if value == "fp8":
        raise RecipeError('mixed_precision="fp8" is not supported', 'mixed_precision="bf16"')
    return str(value).lower()


def _refuse(**settings: Any) -> None:
    """Raise an error for a setting that the engine does not support: no setting is ignored silently."""
    for name, value in settings.items():
        if value is not None:
            raise RecipeError(f"{name} is not supported", _CURES[name])
    for name, cure in _LAUNCHED_WITH.items():
        if is_set(name):
            raise RecipeError(f"{name}={os.environ[name]} is not supported", cure)
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo.lower() != "no":
        raise RecipeError(f"ACCELERATE_DYNAMO_BACKEND={dynamo} is not supported", _COMPILE)
