"""Copies of the training state in host memory, which are written to disk while training continues."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.checkpoint.codec import Encoded, Tree
from trimtab.checkpoint.tensor_file import CopiedTensor, Staging, as_bytes, in_order, num_bytes_of
from trimtab.hardware.memory import free_in_cgroups

# Pinned memory is allocated in powers of two. Slabs of one size, which tensors may span, waste none of it.
SLAB_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CopiedPart:
    """An encoded part whose tensors were copied, and no longer change with the run."""

    tree: Tree
    tensors: dict[str, CopiedTensor]


class Snapshots:
    """Takes one snapshot at a time, into host memory that is reused for the next.

    Args:
        slab_bytes: The size of one memory allocation.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []
        self._staging = Staging()

    @property
    def num_bytes_held(self) -> int:
        """The host memory that is allocated."""
        return len(self._slabs) * self._slab_bytes

    def num_bytes_missing(self, parts: Mapping[str, Encoded]) -> int:
        """Return the host memory that a snapshot of these parts needs beyond what is allocated."""
        return self._num_slabs(parts) * self._slab_bytes - self.num_bytes_held

    def take(self, parts: Mapping[str, Encoded]) -> tuple[dict[str, CopiedPart], Callable[[], None]]:
        """Copy the tensors of all parts; the previous snapshot is overwritten.

        Copies from a GPU are asynchronous and ordered on its current stream, so the caller can continue immediately:
        work that it queues later cannot change them.

        Returns:
            The copies, and a function that waits until they are complete (the host-device sync).
        """
        devices = {tensor.device for part in parts.values() for tensor in part.tensors.values()}
        on_cuda = {device for device in devices if device.type == "cuda"}
        self._allocate(self._num_slabs(parts), pinned=bool(on_cuda))
        copied, used = {}, 0
        for name, part in parts.items():
            tensors = {}
            for key, tensor in part.tensors.items():
                places = self._copy(tensor.detach(), used)
                tensors[key] = CopiedTensor(tensor.dtype, tuple(tensor.shape), places)
                used += sum(place.numel() for place in places)
            copied[name] = CopiedPart(part.tree, tensors)
        return copied, _record_events(on_cuda)

    def drop(self) -> None:
        """Free the memory."""
        self._slabs.clear()

    def _num_slabs(self, parts: Mapping[str, Encoded]) -> int:
        total = sum(num_bytes_of(t.dtype, t.shape) for part in parts.values() for t in part.tensors.values())
        return -(-total // self._slab_bytes)

    def _allocate(self, num_slabs: int, pinned: bool) -> None:
        if self._slabs and self._slabs[0].is_pinned() != pinned:
            self._slabs.clear()
        del self._slabs[num_slabs:]
        while len(self._slabs) < num_slabs:
            self._slabs.append(torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=pinned))

    def _copy(self, tensor: torch.Tensor, used: int) -> tuple[torch.Tensor, ...]:
        places = []
        for part in in_order(tensor):
            needs_staging = part.device.type == "cpu" and not part.is_contiguous()
            flat, begin = self._staging.bring(part) if needs_staging else as_bytes(part), 0
            while begin < flat.numel():
                index, offset = divmod(used, self._slab_bytes)
                place = self._slabs[index][offset : offset + flat.numel() - begin]
                place.copy_(flat[begin : begin + place.numel()], non_blocking=flat.device.type == "cuda")
                places.append(place)
                begin += place.numel()
                used += place.numel()
        return tuple(places)


def _record_events(devices: set[torch.device]) -> Callable[[], None]:
    events = []
    for device in devices:
        event = torch.Event(device, blocking=True)  # sleeps while it waits instead of spinning
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def free_host_bytes() -> int | None:
    """Return the free host memory, limited by the machine and by its container; None if it is unknown."""
    amounts = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
    except OSError:
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            amounts.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min([*amounts, *free_in_cgroups()], default=None)
