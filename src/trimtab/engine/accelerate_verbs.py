"""Methods of `Engine` that only scripts written for Accelerate use, and the names of Accelerate that it lacks."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.join import Join, Joinable

from trimtab.engine.accumulation import Accumulation
from trimtab.engine.prepared_loader import ActiveLoaders, PreparedLoader
from trimtab.engine.prepared_parts import PreparedParts

UNSUPPORTED = {
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
        """Rows of the dataset left over by full batches of all processes; -1 where this is unknown."""
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
    """Let some processes have fewer batches: they take part in the collectives of the others until these are done."""
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
