"""How much memory a run uses and may use, and what an error says that comes from too little of it.

What is used is the allocator's figure on an accelerator, the process's resident memory on the CPU.
"""

import ctypes
import gc
import os
import platform
import resource
import sys

import torch

from trimtab.errors import DoesNotFit, RecipeError
from trimtab.log import say
from trimtab.units import bytes_as_words, format_bytes, parse_bytes

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# a context with its libraries takes 0.3 to 0.8 GiB; what is more belongs to other processes, which no budget counts
_LARGEST_CONTEXT = 2**30
# CUDA's context and libraries, as nvidia-smi sees them beside the allocator; with kernels of Triton and bitsandbytes
# more. Measured on an H200 with CUDA 13.
CONTEXT_BYTES = 850 * 2**20
KERNELS_BYTES = 125 * 2**20
_capped: set[torch.device] = set()
_WORDS_OF_TOO_LITTLE = ("out of memory", "can't allocate memory", "status_alloc_failed")


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.memory_allocated(device)) if hasattr(module, "memory_allocated") else 0
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """The most bytes that were in use at once."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return int(module.max_memory_allocated(device)) if hasattr(module, "max_memory_allocated") else 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


def reset_peak_memory(device: torch.device) -> None:
    """Let `peak_memory` count from now on; of a process on the CPU the system keeps its own peak."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(device)


def peak_reserved(device: torch.device) -> int:
    """The most bytes that the allocator took from the device at once; on the CPU the same as `peak_memory`."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is None or not hasattr(module, "max_memory_reserved"):
        return peak_memory(device)
    return int(module.max_memory_reserved(device))


def release_cached_memory(device: torch.device) -> None:
    """Free what nothing refers to any more, and give the allocator's cache back to the device."""
    gc.collect()
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()


# ---------------------------------------------------------------------- too little of it


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that there was no memory left, on an accelerator or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = str(error).lower()
    return isinstance(error, RuntimeError) and any(part in words for part in _WORDS_OF_TOO_LITTLE)


def wanted_words(error: BaseException) -> str:
    """What an error of too little memory says was asked for, such as "64.00 MiB more"; empty if it says nothing."""
    words = str(error)
    for before in ("Tried to allocate ", "you tried to allocate "):
        if before in words:
            amount = words.partition(before)[2].split()[:2]
            return f"{' '.join(amount).rstrip('.,')} more"
    return ""


# ---------------------------------------------------------------------- a budget


def total_memory(device: torch.device) -> int:
    """All memory that a device has, or 0 where nobody can say."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[1]) if hasattr(module, "mem_get_info") else 0


def free_memory(device: torch.device) -> int:
    """What this process may use of a device: what is free now, and what it holds already; 0 where nobody can say."""
    if device.type == "cpu":
        try:
            with open("/proc/meminfo") as lines:
                available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) * 1024 + memory_in_use(device)
        except (OSError, StopIteration):  # not Linux
            return total_memory(device)
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    return int(module.mem_get_info(device)[0]) + int(module.memory_reserved(device))


def memory_outside(device: torch.device) -> int:
    """What a process holds of an accelerator besides the allocator's: its context and libraries. None on the CPU."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is None or not hasattr(module, "mem_get_info"):
        return 0
    free, total = module.mem_get_info(device)
    return min(max(int(total - free) - int(module.memory_reserved(device)), 0), _LARGEST_CONTEXT)


def budget_in_bytes(budget: str | int | None, device: torch.device) -> int | None:
    """The budget of a recipe as a number.

    Args:
        budget: A size such as "8GiB"; "auto" is what the device has free; None is no budget.
        device: What it is a budget of.

    Raises:
        RecipeError: The device has less.
    """
    if budget is None:
        return None
    if budget == "auto":
        return free_memory(device) + memory_outside(device) or None
    wanted, total = parse_bytes(budget), total_memory(device)
    if total and wanted > total:
        has = bytes_as_words(total // 2**20 * 2**20)
        raise RecipeError(
            f"memory.budget is {format_bytes(wanted)}, and {device} has {format_bytes(total)}",
            f"memory.budget: auto takes what is free; {has} is all",
        )
    return wanted


class MemoryCap:
    """What holds a process to its budget: a hard limit on CUDA, a warning elsewhere.

    Args:
        device: Where the run computes.
        budget_bytes: What it may use; None is no limit.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._device = device
        self.budget_bytes = budget_bytes
        self._has_warned = False

    def share(self, in_use: int) -> float | None:
        """How much of the budget is in use; None without one. Says so, once, where it is more than all."""
        if not self.budget_bytes:
            return None
        if in_use > self.budget_bytes and not self._has_warned:
            self._has_warned = True
            say(
                f"{format_bytes(in_use)} are in use on {self._device}, more than memory.budget "
                f"({format_bytes(self.budget_bytes)}), which cannot be enforced there"
            )
        return in_use / self.budget_bytes


def cap_memory(device: torch.device, budget_bytes: int | None, outside_bytes: int = 0) -> MemoryCap:
    """Hold this process to a budget from now on.

    On CUDA the allocator refuses what would go beyond it. On the CPU, and on accelerators that cannot, nothing is
    refused, and `MemoryCap.share` says when it is passed.

    Args:
        device: Where the run computes.
        budget_bytes: All that the process may use of it; None is no limit.
        outside_bytes: How much of that the allocator does not count: see `memory_outside`.

    Raises:
        RecipeError: The device has less.
        DoesNotFit: Nothing is left for the allocator.
    """
    budget_in_bytes(budget_bytes, device)
    if device.type == "cuda" and budget_bytes is not None:
        if budget_bytes <= outside_bytes:
            raise DoesNotFit(
                f"memory.budget is {format_bytes(budget_bytes)}, and the context of {device} alone takes "
                f"{format_bytes(outside_bytes)}"
            )
        fraction = min((budget_bytes - outside_bytes) / total_memory(device), 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        _capped.add(device)
    elif device in _capped:  # by a run before this one in the same process; a cap of the user's own stays
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        _capped.discard(device)
    return MemoryCap(device, budget_bytes)


def prefer_expandable_segments() -> bool:
    """Let CUDA's allocator grow its segments, which leaves far less memory unused between blocks.

    Best before the first allocation; segments that are there stay as they are.

    Returns:
        Whether it was done: not where the user configured the allocator, nor where torch has no such segments.
    """
    if not _can_prefer_expandable_segments():
        return False
    # torch 2.13 has deprecated the name under torch.cuda; the environment is read once, long before we are called
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def has_expandable_segments() -> bool:
    """Whether CUDA's allocator has expandable segments in a run of this process, also where none has begun yet.

    They are there where the user's own settings ask for them, or where `prefer_expandable_segments` can.
    """
    if not _knows_expandable_segments():
        return False
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # what this process has set since
    settings = [*(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES), str(read())]
    words = ",".join(settings).replace(" ", "").split(",")
    asked = [word.removeprefix("expandable_segments:") for word in words if word.startswith("expandable_segments:")]
    return asked[-1] == "True" if asked else _can_prefer_expandable_segments()


def _knows_expandable_segments() -> bool:
    return sys.platform == "linux" and torch.version.cuda is not None  # neither Windows nor ROCm has them


def _can_prefer_expandable_segments() -> bool:
    is_free = not any(name in os.environ for name in _ALLOCATOR_VARIABLES)
    return _knows_expandable_segments() and is_free and hasattr(torch._C, "_accelerator_setAllocatorSettings")


def keep_freed_memory() -> bool:
    """Let the C library keep large blocks that were freed, in the place of returning them to the system each time.

    By default glibc maps every large tensor afresh and unmaps it when it is freed; a training step on the CPU then
    spends a tenth of its time and more on page faults. The process holds on to its peak instead, which it needs again
    in the next step anyway.

    Returns:
        Whether it was done: only with glibc, and not where the user tuned malloc through the environment.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_threshold = -1, -3  # numbers of malloc.h
    return bool(mallopt(mmap_threshold, 2**30)) and bool(mallopt(trim_threshold, 2**31 - 1))


def usually_outside(with_kernels: bool) -> int:
    """What a process holds of a GPU besides the allocator's, once its steps run: the context and loaded kernels."""
    return CONTEXT_BYTES + (KERNELS_BYTES if with_kernels else 0)
