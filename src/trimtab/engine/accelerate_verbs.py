"""Methods of `Engine` that only scripts written for Accelerate use, and Accelerate names that it does not support."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from trimtab.distributed.ddp import DataParallel
from trimtab.distributed.process_state import ProcessInterface
from trimtab.engine.accelerate_settings import loader_rules
from trimtab.engine.accumulation import Accumulation
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.prepared_parts import PreparedParts

UNSUPPORTED = {
    "register_save_state_pre_hook": "engine.register_for_checkpointing(OBJECT), with state_dict and load_state_dict",
    "register_load_state_pre_hook": "engine.register_for_checkpointing(OBJECT), with state_dict and load_state_dict",
    "lomo_backward": "use engine.backward(loss), with an optimizer from trimtab.optim.build",
    "maybe_context_parallel": "leave it out: a sequence is computed by one process",
    "deepspeed_ulysses_dl_adapter": "leave it out: a sequence is computed by one process",
    "torch_device_mesh": "leave it out: processes are data parallel only",
    "project_configuration": "use engine.project_dir",
    "fp8_backend": 'use mixed_precision="bf16"',
    "save_iteration": "pass a folder to save_state: engine.save_state(f'checkpoints/{step}')",
}


class AccelerateInterface(ProcessInterface):
    """The properties and methods of `Engine` that only scripts written for Accelerate use."""

    # Accelerate's names for kinds of parallelism that do not exist here.
    deepspeed_plugin = parallelism_config = None
    is_fsdp2 = is_composable_parallelism_enabled = False
    tensor_parallel_rank = pipeline_parallel_rank = context_parallel_rank = data_parallel_shard_rank = 0
    use_stateful_dataloader = True  # every prepared loader has a state_dict

    device: torch.device
    _as_accelerate: bool
    _dataloader_config: Any
    _prepared: PreparedParts

    should_save_model = ProcessInterface.is_main_process
    multi_device = ProcessInterface.use_distributed

    @property
    def data_parallel_rank(self) -> int:
        """The rank of this process."""
        return self._world.process_index

    @property
    def dataloader_config(self) -> Any:
        """The DataLoaderConfiguration; a new value applies to loaders prepared after the assignment."""
        return self._dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, config: Any) -> None:
        self._prepared.loader_rules = loader_rules(config, None, self._as_accelerate)
        self._dataloader_config = config

    @property
    def split_batches(self) -> bool:
        """Whether the batch size of a loader counts the rows of all processes."""
        return self._prepared.loader_rules.splits

    @property
    def even_batches(self) -> bool:
        """Whether every process has the same number of batches."""
        return self._prepared.loader_rules.is_even

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether the main process reads the data for all processes; None means only for iterable datasets."""
        return self._prepared.loader_rules.dispatches

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether shuffled orders are determined by seed and epoch alone."""
        return self._prepared.loader_rules.is_seedable

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.device.type in ("cuda", "xpu")

    def verify_device_map(self, model: torch.nn.Module) -> bool:
        """Return whether a model was split over several devices when it was loaded."""
        return any(len(getattr(part, "hf_device_map", ())) > 1 for part in model.modules())

    def trigger_sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Return a context for the last backward after several forwards under `no_sync`; it exchanges the gradients."""
        return model.sync_in_backward() if isinstance(model, DataParallel) else nullcontext()

    def join_uneven_inputs(
        self, joinables: Sequence[Any], even_batches: bool | None = None
    ) -> AbstractContextManager[None]:
        """Return a context in which some processes may have fewer batches than others.

        Args:
            joinables: Prepared models.
            even_batches: Whether loaders give every process the same number of batches inside the context; None keeps
                their setting.
        """
        return join_uneven_inputs(self._prepared, joinables, even_batches)


class GradientState:
    """A read-only view of the current window and epoch under Accelerate's names."""

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
        """Micro-batches per optimizer step."""
        return self._accumulation.num_steps

    @property
    def sync_with_dataloader(self) -> bool:
        """Whether the last batch of an epoch ends a window."""
        return self._accumulation.rules.ends_with_epoch

    @property
    def active_dataloader(self) -> PreparedLoader | None:
        """The innermost prepared loader being iterated."""
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
        """Rows of the dataset left over by full batches of all processes; -1 if unknown."""
        loader = self._active.innermost
        if loader is None or loader.loader.drop_last:
            return -1
        try:
            return loader.total_dataset_length % (loader.total_batch_size or 1)
        except TypeError:
            return -1

    @staticmethod
    def _reset_state() -> None:
        """Do nothing: each engine has its own state."""


def save_object(obj: Any, file: str | Path, safe_serialization: bool) -> None:
    """Write an object with `torch.save`, or a dict of tensors as safetensors."""
    if not safe_serialization:
        torch.save(obj, file)
        return
    from safetensors.torch import save_file

    # tied weights once: safetensors rejects two names that share memory
    kept: dict[tuple[int, tuple[int, ...]], str] = {}
    for name, tensor in obj.items():
        kept.setdefault((tensor.data_ptr() if tensor.numel() else id(tensor), tuple(tensor.shape)), name)
    save_file({name: obj[name].contiguous() for name in kept.values()}, file, metadata={"format": "pt"})


@contextmanager
def join_uneven_inputs(
    prepared: PreparedParts, joinables: Sequence[Any], even_batches: bool | None = None
) -> Iterator[None]:
    """Let some processes have fewer batches: they join the collectives of the others until those are done."""
    if prepared.world.num_processes == 1:
        yield
        return
    if not all(isinstance(one, Joinable) for one in joinables):
        warnings.warn(
            "join_uneven_inputs has no effect: it is only supported for multi-GPU training with models that prepare "
            "has wrapped in data parallelism",
            stacklevel=3,
        )
        yield
        return
    overridden = [] if even_batches is None else _override_even_batches(prepared.loaders, even_batches)
    is_even = prepared.loader_rules.is_even if even_batches is None else even_batches
    try:
        with Join(list(joinables), enable=not is_even, throw_on_early_termination=False):
            yield
    finally:
        for loader, before in overridden:
            loader.override_even_batches(before)


def _override_even_batches(loaders: list[PreparedLoader], is_even: bool) -> list[tuple[PreparedLoader, bool]]:
    overridden = []
    for loader in loaders:
        before = loader.override_even_batches(is_even)
        if before is None:
            warnings.warn(
                "even_batches of join_uneven_inputs is only supported for map-style datasets that are sharded like "
                "Accelerate shards them; it has no effect on another prepared loader",
                stacklevel=4,
            )
        else:
            overridden.append((loader, before))
    return overridden
