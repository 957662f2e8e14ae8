"""How much memory a forward leaves behind for backward: every storage that it made and that is still alive."""

import gc

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Births(TorchDispatchMode):
    """Sees the storages that are made while it is active, and keeps none of them alive."""

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
        """Bytes of what was made and is still there, apart from the tensors given."""
        spared = {tensor.untyped_storage()._cdata for tensor in but}
        return sum(size for key, (ref, size) in self._made.items() if key not in spared and not ref.expired())


def kept_bytes(model: torch.nn.Module, loss_of) -> int:
    """Bytes alive after `loss_of()` that are neither parameters nor buffers; the graph of its loss holds them."""
    gc.collect()
    with Births() as births:
        loss = loss_of()
    gc.collect()
    return births.alive_bytes(but=[*model.parameters(), *model.buffers(), loss])
