"""A copy of the state in host memory, taken in a moment and written in peace while the training goes on."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.checkpoint.codec import Encoded, Tree
from trimtab.checkpoint.tensor_file import Staging, as_bytes, in_order, num_bytes_of

# Pinned memory comes in powers of two; in slabs of one size, which tensors may span, nothing of it is wasted.
SLAB_BYTES = 64 * 2**20


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor whose bytes lie in slabs of host memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[torch.Tensor, ...]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its bytes in order."""
        yield from self.places


@dataclass(frozen=True)
class CopiedPart:
    """A part of the state that no longer changes with the run."""

    tree: Tree
    tensors: dict[str, CopiedTensor]


class Snapshots:
    """Takes snapshots, one at a time, in memory that is kept from one to the next.

    Args:
        slab_bytes: The size of the pieces in which memory is taken.
    """

    def __init__(self, slab_bytes: int = SLAB_BYTES) -> None:
        self._slab_bytes = slab_bytes
        self._slabs: list[torch.Tensor] = []
        self._staging = Staging()

    @property
    def num_bytes_held(self) -> int:
        """The host memory that is kept."""
        return len(self._slabs) * self._slab_bytes

    def num_bytes_missing(self, parts: Mapping[str, Encoded]) -> int:
        """The host memory that a snapshot of these parts needs beyond what is kept."""
        return self._num_slabs(parts) * self._slab_bytes - self.num_bytes_held

    def take(self, parts: Mapping[str, Encoded]) -> tuple[dict[str, CopiedPart], Callable[[], None]]:
        """Copy the tensors of all parts; the snapshot before this one is overwritten.

        From a GPU they are copied in the order of its work, so that the caller can go on at once: what it queues later
        cannot change them.

        Returns:
            The copies, and a function that waits until they are there.
        """
        self._fit(self._num_slabs(parts), pinned=_has_cuda_tensors(parts))
        copied, used, devices = {}, 0, set()
        for name, part in parts.items():
            tensors = {}
            for key, tensor in part.tensors.items():
                places = self._copy(tensor.detach(), used)
                tensors[key] = CopiedTensor(tensor.dtype, tuple(tensor.shape), places)
                used += sum(place.numel() for place in places)
                devices.add(tensor.device)
            copied[name] = CopiedPart(part.tree, tensors)
        return copied, _waiting_for({device for device in devices if device.type == "cuda"})

    def drop(self) -> None:
        """Give the memory back."""
        self._slabs.clear()

    def _num_slabs(self, parts: Mapping[str, Encoded]) -> int:
        total = sum(num_bytes_of(t.dtype, t.shape) for part in parts.values() for t in part.tensors.values())
        return -(-total // self._slab_bytes)

    def _fit(self, num_slabs: int, pinned: bool) -> None:
        if self._slabs and self._slabs[0].is_pinned() != pinned:
            self._slabs.clear()
        del self._slabs[num_slabs:]
        while len(self._slabs) < num_slabs:
            self._slabs.append(torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=pinned))

    def _copy(self, tensor: torch.Tensor, used: int) -> tuple[torch.Tensor, ...]:
        places = []
        for part in in_order(tensor):
            can_be_seen = part.is_contiguous() or part.device.type != "cpu"
            flat, begin = as_bytes(part) if can_be_seen else self._staging.bring(part), 0
            while begin < flat.numel():
                index, offset = divmod(used, self._slab_bytes)
                place = self._slabs[index][offset : offset + flat.numel() - begin]
                place.copy_(flat[begin : begin + place.numel()], non_blocking=flat.device.type == "cuda")
                places.append(place)
                begin += place.numel()
                used += place.numel()
        return tuple(places)


def _has_cuda_tensors(parts: Mapping[str, Encoded]) -> bool:
    return any(tensor.device.type == "cuda" for part in parts.values() for tensor in part.tensors.values())


def _waiting_for(devices: set[torch.device]) -> Callable[[], None]:
    events = []
    for device in devices:
        event = torch.Event(device, blocking=True)  # one that waits burns no core
        event.record(torch.cuda.current_stream(device))
        events.append(event)

    def wait() -> None:
        for event in events:
            event.synchronize()

    return wait


def free_host_bytes() -> int | None:
    """How much host memory a process may still take, by the machine and by its container; None if nobody tells."""
    amounts = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                amounts.append(int(line.split()[1]) * 1024)
    except OSError:
        if "SC_AVPHYS_PAGES" in os.sysconf_names:
            amounts.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min([*amounts, *_free_in_groups()], default=None)


def _free_in_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """What control groups leave: cached pages of files count as free, because the system gives them up."""
    try:
        groups = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
    except OSError:
        return []
    free = []
    for controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        base = root / "memory" if controllers else root
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        cached = "total_inactive_file" if controllers else "inactive_file"
        for folder in {base / path.lstrip("/"), base}:  # a container sees its own group as the root
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max":
                    free.append(max(0, int(limit) - int(used) + int(stat.get(cached, 0))))
            except (OSError, ValueError):
                continue
    return free
