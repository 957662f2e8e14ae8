"""Verbs and properties that only scripts written for Accelerate ask for; `Engine` inherits them.

They read what the engine's parts know and decide nothing of their own. A verb that the engine cannot have says why, and
what to do instead.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch.distributed.algorithms.join import Join, Joinable

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.process_state import ProcessState
from trimtab.distributed.world import World
from trimtab.engine.accelerate_settings import loader_rules
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.sharding import LoaderRules
from trimtab.randomness import random_state, restore_random_state

T = TypeVar("T")
_REFUSED = {
    "register_save_state_pre_hook": "engine.register_for_checkpointing(an object with state_dict and load_state_dict)",
    "register_load_state_pre_hook": "engine.register_for_checkpointing(an object with state_dict and load_state_dict)",
    "lomo_backward": "engine.backward(loss), with an optimizer of trimtab.optim.build",
    "maybe_context_parallel": "leave it out: a sequence is computed by one process",
    "deepspeed_ulysses_dl_adapter": "leave it out: a sequence is computed by one process",
    "torch_device_mesh": "leave it out: processes are data parallel only",
    "project_configuration": "engine.project_dir",
    "fp8_backend": 'mixed_precision="bf16"',
    "save_iteration": "give save_state a folder: engine.save_state(f'checkpoints/{step}')",
}


class GradientState:
    """Where the engine is in its window and its epoch, under Accelerate's names. It is a view, and changes nothing."""

    adjust_scheduler = False
    is_xla_gradients_synced = False

    def __init__(self, accumulation: Accumulation, active: ActiveLoaders) -> None:
        self._accumulation = accumulation
        self._active = active

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-batch ends its window."""
        return self._accumulation.sync

    @property
    def num_steps(self) -> int:
        """Micro-batches for each optimizer step."""
        return self._accumulation.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of an epoch ends a window."""
        return self._accumulation.rules.ends_with_epoch

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The prepared loader that is being iterated, the innermost of several."""
        return self._active.innermost

    @property
    def in_dataloader(self) -> bool:
        """Whether a prepared loader is being iterated."""
        return self._active.innermost is not None

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last of its epoch."""
        loader = self._active.innermost
        return loader is not None and loader.end_of_epoch

    @property
    def remainder(self) -> int:
        """Rows of the dataset that do not fill a batch of all processes; -1 where that is not known."""
        loader = self._active.innermost
        if loader is None or loader.loader.drop_last:
            return -1
        try:
            return loader.total_dataset_length % (loader.total_batch_size or 1)
        except TypeError:
            return -1

    @staticmethod
    def _reset_state() -> None:
        """Nothing to do: each engine has its own."""


class AccelerateVerbs:
    """What an engine has for scripts written for Accelerate."""

    device: torch.device
    _world: World
    _loader_rules: LoaderRules
    _dataloader_config: Any
    _loaders: list[PreparedLoader]
    _active_loaders: ActiveLoaders
    _accumulation: Accumulation
    _as_accelerate: bool
    _given: tuple[tuple[Any, ...], dict[str, Any]]
    project_dir: Path | None

    # processes are data parallel, and nothing else
    deepspeed_plugin = parallelism_config = None
    is_fsdp2 = is_composable_parallelism_enabled = False
    tensor_parallel_rank = pipeline_parallel_rank = context_parallel_rank = data_parallel_shard_rank = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember what was given: that is what an engine is pickled by."""
        engine = super().__new__(cls)
        engine._given = args, kwargs
        return engine

    def __reduce__(self) -> tuple[Any, ...]:
        """An engine is pickled by its settings: its processes, and what was prepared, stay where they are."""
        return _rebuilt, (type(self), *self._given)

    if not TYPE_CHECKING:  # else every misspelt name would be one that mypy takes for granted

        def __getattr__(self, name: str) -> Any:
            """Say what to do instead of a verb that there is not."""
            if name in _REFUSED:
                raise AttributeError(f"{name} is not supported\n  cure: {_REFUSED[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # ------------------------------------------------------------------ what is the case

    @cached_property
    def state(self) -> ProcessState:
        """The processes and the precision, under Accelerate's names."""
        return ProcessState(self._world, self.device, self.mixed_precision)  # type: ignore[attr-defined]

    @cached_property
    def gradient_state(self) -> GradientState:
        """The window and the epoch, under Accelerate's names."""
        return GradientState(self._accumulation, self._active_loaders)

    @property
    def dataloader_config(self) -> Any:
        """The DataLoaderConfiguration that was given; one given later counts for loaders prepared from then on."""
        return self._dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, config: Any) -> None:
        self._loader_rules = loader_rules(config, None, self._as_accelerate)
        self._dataloader_config = config

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader is that of all processes together."""
        return self._loader_rules.splits

    @property
    def even_batches(self) -> bool:
        """Whether every process has the same number of batches."""
        return self._loader_rules.is_even

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the first process reads for all; None: where a dataset is iterable."""
        return self._loader_rules.dispatches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffled orders follow from a seed and the epoch alone."""
        return self._loader_rules.is_seedable

    @property
    def use_stateful_dataloader(self) -> bool:
        """Every prepared loader has a state."""
        return True

    @property
    def non_blocking(self) -> bool:
        """Batches are copied without waiting wherever the device can."""
        return self.device.type in ("cuda", "xpu")

    @property
    def logging_dir(self) -> Path | None:
        """Where trackers write."""
        return self.project_dir

    @property
    def data_parallel_rank(self) -> int:
        """This process among all."""
        return self._world.process_index

    @property
    def should_save_model(self) -> bool:
        """Whether this process writes models: the first one does."""
        return self._world.process_index == 0

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Whether a model was spread over several devices when it was loaded."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    @property
    def multi_device(self) -> bool:
        """Whether models are connected with those of other processes."""
        return self._world.num_processes > 1

    # ------------------------------------------------------------------ processes

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """A decorator: the function runs on the last process only."""
        return self.state.on_last_process(function)

    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """A decorator, with or without the function: it runs on the process of that index only."""
        return self.state.on_process(function, process_index)

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """A decorator, with or without the function: it runs on that process of each host only."""
        return self.state.on_local_process(function, local_process_index)

    def save(self, obj: Any, f: str | Path, safe_serialization: bool = False) -> None:
        """`torch.save`, or with `safe_serialization` a dict of tensors as safetensors, on the first process only."""
        if self._world.process_index > 0:
            return
        if safe_serialization:
            from safetensors.torch import save_file

            save_file(_each_once(obj), f, metadata={"format": "pt"})
        else:
            torch.save(obj, f)

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """A context for the last backward of several forwards under `no_sync`: processes exchange their gradients."""
        return model.exchanging_in_backward() if isinstance(model, DataParallel) else nullcontext()

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """A context in which some processes may have fewer batches: they answer for the others' exchanges meanwhile.

        Args:
            joinables: Prepared models.
            even_batches: Whether loaders give every process the same number of batches, in this context; None leaves
                it as it is.
        """
        if self._world.num_processes == 1:
            yield
            return
        if not all(isinstance(one, Joinable) for one in joinables):
            warnings.warn(
                "join_uneven_inputs has no effect: it is only supported for multi-GPU training, of models that prepare "
                "has connected",
                stacklevel=3,
            )
            yield
            return
        overridden = [] if even_batches is None else self._override_even_batches(even_batches)
        is_even = self.even_batches if even_batches is None else even_batches
        try:
            with Join(list(joinables), enable=not is_even, throw_on_early_termination=False):
                yield
        finally:
            for loader, before in overridden:
                loader.override_even_batches(before)

    def _override_even_batches(self, is_even: bool) -> list[tuple[PreparedLoader, bool]]:
        overridden = []
        for loader in self._loaders:
            before = loader.override_even_batches(is_even)
            if before is None:
                warnings.warn(
                    "even_batches of join_uneven_inputs is only supported for map-style datasets that are shared out "
                    "as Accelerate does it; it has no effect on a loader that was prepared",
                    stacklevel=4,
                )
            else:
                overridden.append((loader, before))
        return overridden


def _rebuilt(kind: type[AccelerateVerbs], args: tuple[Any, ...], kwargs: dict[str, Any]) -> AccelerateVerbs:
    before = random_state()
    engine = kind(*args, **kwargs)
    restore_random_state(before)  # a seed among the settings was for the first one
    return engine


def _each_once(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights once: a safetensors file holds no two names for one memory."""
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in tensors.items():
        kept.setdefault((tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape)), name)
    return {name: tensors[name].contiguous() for name in kept.values()}
