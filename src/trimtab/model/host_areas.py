"""Areas of host memory for tensors that a device reads and writes often: pinned in place, of exactly their size."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from weakref import finalize, ref

import torch

from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import free_host_memory, memory_in_use
from trimtab.log import log_info_once
from trimtab.units import format_bytes

_ALIGNMENT = 512  # alignment in bytes, as for separate allocations: kernels may choose their algorithm by it
_HOST = torch.device("cpu")


class HostArea:
    """An area of host memory. It exists as long as the data of a tensor is in it; this object does not keep it alive.

    Args:
        memory: The array that all tensors in the area are parts of.
    """

    def __init__(self, memory: Any) -> None:
        self._memory = ref(memory)

    def whole(self) -> torch.Tensor | None:
        """All bytes of the area; None if it no longer exists."""
        memory = self._memory()
        return None if memory is None else torch.from_numpy(memory)


def empty_on_host(
    tensors: Sequence[torch.Tensor], *, pins: bool, key: str = "memory.update: host"
) -> list[torch.Tensor]:
    """Uninitialized tensors like these in one area of host memory.

    Args:
        tensors: The tensors; their strides are kept if they have no gaps.
        pins: Whether to pin the area, so that copies overlap with computation; if that fails, it is ordinary memory.
        key: The setting that needs it, for the message if pinning fails.
    """
    return _area_for(tensors, pins=pins, key=key)[1]


def move_to_area(tensors: Sequence[torch.Tensor], *, pins: bool, key: str) -> HostArea:
    """Move the data of tensors to one area of host memory, laid out by `places_of`.

    Args:
        tensors: The tensors.
        pins: Whether to pin the area.
        key: The setting that needs it, for a message.
    """
    memory, homes = _area_for(tensors, pins=pins, key=key)
    for tensor, home in zip(tensors, homes, strict=True):
        home.copy_(tensor.data)
        tensor.data = home
    return HostArea(memory)


def _area_for(tensors: Sequence[torch.Tensor], *, pins: bool, key: str) -> tuple[Any, list[torch.Tensor]]:
    begins, size = places_of(tensors)
    area = torch.empty(size, dtype=torch.uint8)
    if pins and size:
        _pin(area, key)
    memory = area.numpy()  # a tensor on a part of an array has its own storage, which files of weights need
    parts = [memory[begin : begin + tensor.nbytes] for tensor, begin in zip(tensors, begins, strict=True)]
    return memory, [laid_out(torch.from_numpy(part), tensor) for tensor, part in zip(tensors, parts, strict=True)]


def places_of(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Where tensors start in the memory that they share, in bytes, and its size."""
    begins, size = [], 0
    for tensor in tensors:
        begins.append(size)
        size += aligned(tensor.nbytes)
    return begins, size


def aligned(num_bytes: int) -> int:
    """Bytes from the start of a tensor to the start of the next one."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def laid_out(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bytes seen as a tensor of the dtype, shape and, if it has no gaps, strides of another one."""
    if not like.numel():
        return torch.empty(like.size(), dtype=like.dtype, device=memory.device)
    whole = memory.view(like.dtype)
    return whole.as_strided(like.size(), like.stride()) if has_no_gaps(like) else whole.view(like.size())


def has_no_gaps(tensor: torch.Tensor) -> bool:
    """Whether the elements of a tensor fill its memory, in any order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _pin(area: torch.Tensor, key: str) -> None:
    """Pin host memory in place; torch's own allocator of pinned memory would round its size up to a power of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(runtime.cudaHostRegister(area.data_ptr(), area.nbytes, 0))
    if code == 0:
        finalize(area.untyped_storage(), runtime.cudaHostUnregister, area.data_ptr()).atexit = False
        return
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")  # reads, and thereby resets, the error of that call
    log_info_once(
        f"{key}: {format_bytes(area.nbytes)} of host memory cannot be pinned (CUDA error {code}); copies "
        "are slower and do not overlap with computation. Check `ulimit -l` and the memory limit of the container"
    )


def require_host_memory(needed_bytes: int, what: str, cure: str) -> None:
    """Check that there is enough host memory, before any of it is used.

    Args:
        needed_bytes: Bytes that will be used.
        what: What needs them, for the message: "memory.update: host needs {} of host memory for weights".
        cure: What to do instead.

    Raises:
        DoesNotFit: There is not enough host memory.
    """
    available = free_host_memory() - memory_in_use(_HOST)
    if needed_bytes > available:
        needed = what.format(format_bytes(needed_bytes))
        raise DoesNotFit(f"{needed}, and {format_bytes(available)} are available\n  cure: {cure}")
