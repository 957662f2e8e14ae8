"""Move the tensors that blocks save for backward to host memory, and fetch them when backward needs them.

Hooks of autograd see every tensor that a block saves. For a recomputed block this is only its input, because tensors
that `torch.utils.checkpoint` saves inside are hidden from them. For other blocks it is everything. Parameters and their
views or copies, small tensors, and tensors that other blocks also get (masks, positions) stay on the device.

A tensor is copied to the host as soon as it is saved, and its memory is freed after the block that saved it (for the
input of the block) or after the next one (for other tensors): by then the copy is complete, or the device waits for it.
In backward, a block fetches its tensors when the first one is needed, and at the same time those of the block before
it, which arrive while it computes. All tensors with the same memory are copied once.

Saved tensors are owned by the autograd graph, not by this module. When the graph is freed, by backward or after an
exception, the pages return to their pool.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from trimtab.model.host_pages import PAGE_BYTES, HostLink, HostPages, HostRoom

MIN_BYTES = 2**16  # the launch of a smaller copy takes more time than its memory is worth
_STATE = "_trimtab_offloaded_blocks"
_COPIES = frozenset({"ToCopyBackward0", "TBackward0", "ViewBackward0", "TransposeBackward0"})


class OffloadedBlocks:
    """The hooks on the blocks of one model, and the host memory that they share.

    Args:
        pins: Whether host memory is pinned.
        min_bytes: Smaller tensors stay on the device; by default 64 KiB.
        page_bytes: As in `HostPages`.
    """

    def __init__(self, *, pins: bool, min_bytes: int | None = None, page_bytes: int = PAGE_BYTES) -> None:
        self.pages = HostPages(pins=pins, page_bytes=page_bytes)
        self.min_bytes = MIN_BYTES if min_bytes is None else min_bytes
        self.link = HostLink()
        self._handles: list[Any] = []
        self._first: nn.Module | None = None
        self._running: list[tuple[nn.Module, _Call, Any]] = []
        self._last: weakref.ref[_Call] | None = None
        self._leaving: list[weakref.ref[_Moved]] = []  # copied to the host, but still in device memory

    def __deepcopy__(self, memo: Any) -> "OffloadedBlocks":
        return self  # copies of a model share its host memory

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Offload the tensors that these blocks save, from now on."""
        self._first = blocks[0] if blocks else None
        for block in blocks:
            self._handles.append(block.register_forward_pre_hook(self._enter, with_kwargs=True))
            self._handles.append(block.register_forward_hook(self._leave, always_call=True))

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not block.training or not torch.is_grad_enabled():
            return
        before = None if block is self._first or self._last is None else self._last()
        call = _Call(self, block, (*args, *kwargs.values()), before)
        hooks = torch.autograd.graph.saved_tensors_hooks(call.pack, _unpack)
        hooks.__enter__()
        self._running.append((block, call, hooks))

    def _leave(self, block: nn.Module, args: Any, output: Any) -> None:
        if not self._running or self._running[-1][0] is not block:
            return
        _, call, hooks = self._running.pop()
        hooks.__exit__()
        self._release(call)
        self._last = weakref.ref(call)

    def note_leaving(self, moved: "_Moved") -> None:
        """Free the memory of a tensor when its block, or the next one, has ended."""
        self._leaving.append(weakref.ref(moved))

    def _release(self, ended: "_Call") -> None:
        still = []
        for reference in self._leaving:
            moved = reference()
            if moved is None:
                continue
            if moved.is_input or moved.call is not ended:
                moved.release()
            else:
                still.append(reference)
        self._leaving = still


class _Call:
    """One forward of a block, and the tensors that it saved."""

    def __init__(
        self, owner: OffloadedBlocks, block: nn.Module, inputs: tuple[Any, ...], before: "_Call | None"
    ) -> None:
        tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
        hidden = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
        self.owner = owner
        self.before = None if before is None else weakref.ref(before)
        self.room = HostRoom(owner.pages)
        self.hidden = None if hidden is None else _address(hidden)
        self._device = None if hidden is None else hidden.device
        # masks and positions, and tuples of them, which are also arguments of other blocks
        nested = [item for value in inputs if isinstance(value, tuple | list) for item in value]
        others = [*tensors, *(item for item in nested if isinstance(item, torch.Tensor))]
        self._kept = {_address(tensor) for tensor in others if tensor is not hidden}
        self._block = block
        self._weights: set[int] | None = None
        self._known: dict[tuple[int, int], tuple[StorageWeakRef, weakref.ref[_Moved]]] = {}
        self.moved: list[weakref.ref[_Moved]] = []
        self._is_fetched = False

    def pack(self, tensor: torch.Tensor) -> Any:
        """Return what autograd stores instead of a tensor."""
        if not self._may_leave(tensor):
            return tensor
        address = _address(tensor)
        # a weak reference to a storage prevents its address from being reused
        key = address, tensor._version
        _, known = self._known.get(key, (None, None))
        moved = None if known is None else known()
        if moved is None:
            moved = _Moved(self, tensor, is_input=address == self.hidden)
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._known[key] = storage, weakref.ref(moved)
            self.moved.append(weakref.ref(moved))
            self.owner.note_leaving(moved)
        return _Saved(moved, tensor)

    def _may_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.device != self._device:
            return False
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes < self.owner.min_bytes or num_bytes % tensor.element_size():
            return False
        address = _address(tensor)
        if address == self.hidden:
            return True
        if address in self._kept or _is_copy_of_weight(tensor):
            return False
        if self._weights is None:
            self._weights = {_address(weight) for weight in (*self._block.parameters(), *self._block.buffers())}
        return address not in self._weights

    def fetch(self) -> None:
        """Start to fetch everything that is still needed, and what the block before this one saved; only once."""
        if self._is_fetched:
            return
        self._is_fetched = True
        for call in (self, None if self.before is None else self.before()):
            for moved in call.living() if call is not None else ():
                moved.fetch()

    def living(self) -> list["_Moved"]:
        """The saved tensors that the graph still refers to, in the order in which backward needs them."""
        return [moved for reference in reversed(self.moved) if (moved := reference()) is not None]


class _Moved:
    """The memory of saved tensors: being copied to the host, on the host, or being copied back."""

    def __init__(self, call: _Call, tensor: torch.Tensor, *, is_input: bool) -> None:
        self.call, self.is_input = call, is_input  # the call owns the pages, and lives as long as their contents
        self.device = tensor.device
        self._link = call.owner.link
        self._here: torch.Tensor | None = _bytes_of(tensor)
        self._spans, self._sent = self._link.send(self._here, call.room)
        self._fetched: Any = None
        self._is_awaited = True  # whether the current stream has waited for the copy back

    def release(self) -> None:
        """Free the device memory when the copy to the host is complete."""
        if self._here is not None:
            self._link.wait_sent(self._sent)
            self._here = self._sent = None

    def fetch(self) -> None:
        """Start the copy back, unless the tensor is still, or already again, on the device."""
        if self._here is None:
            self._here, self._fetched = self._link.fetch(self._spans, self.device)
            self._is_awaited = False

    def bytes_here(self) -> torch.Tensor:
        """Return the memory on the device, for use by the current stream."""
        self.call.fetch()
        self.fetch()
        self._await()
        assert self._here is not None
        return self._here

    def _await(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self._link.wait_fetched(self._fetched)
            self._fetched = None

    def __del__(self) -> None:
        if not getattr(self, "_is_awaited", True):  # its memory must not be reused before the copy is complete
            self._await()


class _Saved:
    """One saved tensor: a view of memory that was moved."""

    __slots__ = ("_dtype", "_moved", "_offset", "_size", "_stride")

    def __init__(self, moved: _Moved, tensor: torch.Tensor) -> None:
        self._moved, self._dtype = moved, tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> torch.Tensor:
        """Return the tensor on its device, with its original strides."""
        return self._moved.bytes_here().view(self._dtype).as_strided(self._size, self._stride, self._offset)


def _unpack(saved: Any) -> torch.Tensor:
    tensor: torch.Tensor = saved.tensor() if isinstance(saved, _Saved) else saved
    return tensor


def _address(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """All memory behind a tensor, as bytes."""
    with torch.no_grad():
        num_items = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.as_strided((num_items,), (1,), 0).view(torch.uint8)


def _is_copy_of_weight(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter in another dtype, as created by autocast, or a view of one."""
    node = tensor.grad_fn
    while node is not None and node.name() in _COPIES:
        node = node.next_functions[0][0]
    return node is not None and node.name() == "torch::autograd::AccumulateGrad"


def offload_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    *,
    pins: bool,
    min_bytes: int | None = None,
    page_bytes: int = PAGE_BYTES,
) -> OffloadedBlocks:
    """Make blocks of a model save their tensors for backward on the host; this replaces an earlier choice.

    Args:
        model: The model; its parameters, their names and its outputs do not change.
        blocks: The blocks; an empty list ends offloading.
        pins: Whether host memory is pinned, so that copies overlap with computation.
        min_bytes: As in `OffloadedBlocks`.
        page_bytes: As in `HostPages`.
    """
    earlier: OffloadedBlocks | None = model.__dict__.pop(_STATE, None)
    if earlier is not None:
        earlier.detach()
    offloaded = OffloadedBlocks(pins=pins, min_bytes=min_bytes, page_bytes=page_bytes)
    offloaded.attach(blocks)
    if blocks:
        model.__dict__[_STATE] = offloaded
    return offloaded
