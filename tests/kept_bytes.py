"""Memory that a forward pass keeps for backward: every storage that it allocated and that is still alive."""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """Records the storages that are allocated while it is active, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def alive_bytes(self, but=()) -> int:
        """Return the bytes of recorded storages that are still alive, except those of the given tensors."""
        spared = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(size for key, (ref, size) in self._made.items() if key not in spared and not ref.expired())


def kept_bytes(model: torch.nn.Module, loss_of) -> int:
    """Return the bytes alive after `loss_of()` that are neither parameters nor buffers: those that its graph holds."""
    gc.collect()
    with Births() as births:
        loss = loss_of()
    gc.collect()
    return births.alive_bytes(but=[*model.parameters(), *model.buffers(), loss])
