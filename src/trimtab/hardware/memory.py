"""Memory in use, memory budgets and out-of-memory errors.

Memory in use is what torch's caching allocator reports on an accelerator, and the resident set size on the CPU.
"""

import ctypes
import gc
import os
import platform
import resource
import sys
from pathlib import Path

import torch

from trimtab.errors import DoesNotFit, RecipeError
from trimtab.log import say
from trimtab.units import exact_bytes, format_bytes, parse_bytes

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
# a CUDA context with its libraries takes 0.3 to 0.8 GiB; more than this belongs to other processes, which a budget does
# not count
_MAX_CONTEXT_BYTES = 2**30
# Device memory outside torch's allocator, as shown by nvidia-smi: the CUDA context with its libraries, and the modules
# of Triton and bitsandbytes kernels. Measured on an H200 with CUDA 13.
_CONTEXT_BYTES = 850 * 2**20
_KERNELS_BYTES = 125 * 2**20
_capped: set[torch.device] = set()
_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "status_alloc_failed")


def _allocator_bytes(device: torch.device, name: str) -> int | None:
    """Call a memory function of torch.cuda or of another accelerator's module; None if it does not exist."""
    function = getattr(torch.get_device_module(device), name, None)
    return None if function is None else int(function(device))


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type != "cpu":
        return _allocator_bytes(device, "memory_allocated") or 0
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:  # not on Linux
        return peak_memory(device)


def peak_memory(device: torch.device) -> int:
    """Peak of the bytes in use."""
    if device.type != "cpu":
        return _allocator_bytes(device, "max_memory_allocated") or 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # kilobytes on Linux, bytes on macOS


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak that `peak_memory` reports. On the CPU this is not possible."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        if hasattr(module, "reset_peak_memory_stats"):
            module.reset_peak_memory_stats(device)


def peak_reserved(device: torch.device) -> int:
    """Peak of the bytes that the allocator reserved on the device; on the CPU the same as `peak_memory`."""
    reserved = _allocator_bytes(device, "max_memory_reserved") if device.type != "cpu" else None
    return peak_memory(device) if reserved is None else reserved


def release_cached_memory(device: torch.device) -> None:
    """Collect garbage, and return the allocator's cached blocks to the device."""
    gc.collect()
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is not None and hasattr(module, "empty_cache"):
        module.empty_cache()


# ---------------------------------------------------------------------- out of memory


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that an accelerator or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error).lower()
    return isinstance(error, RuntimeError) and any(phrase in message for phrase in _OUT_OF_MEMORY_PHRASES)


def describe_failed_allocation(error: BaseException) -> str:
    """The size of the failed allocation according to the error, such as "64.00 MiB more"; empty if it is not given."""
    message = str(error)
    for before in ("Tried to allocate ", "you tried to allocate "):
        if before in message:
            amount = message.partition(before)[2].split()[:2]
            return f"{' '.join(amount).rstrip('.,')} more"
    return ""


# ---------------------------------------------------------------------- budgets


def total_memory(device: torch.device) -> int:
    """Total memory of a device; 0 if unknown."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    module = torch.get_device_module(device)
    return int(module.mem_get_info(device)[1]) if hasattr(module, "mem_get_info") else 0


def free_host_memory() -> int:
    """Host memory that this process can use without swapping, within the limit of its container."""
    held = memory_in_use(torch.device("cpu"))
    return min([free_memory(torch.device("cpu")), *(free + held for free in free_in_cgroups())])


def free_in_cgroups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the memory that control groups leave free; the page cache counts as free: the kernel reclaims it."""
    try:
        groups = [line.split(":", 2)[1:] for line in own.read_text().splitlines()]
    except OSError:
        return []
    free = []
    for controllers, path in groups:
        if controllers not in ("", "memory"):
            continue
        base = root / "memory" if controllers else root  # version 1 and 2 of control groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        cached = "total_inactive_file" if controllers else "inactive_file"
        for folder in {base / path.lstrip("/"), base}:  # inside a container its own group is mounted as the root
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                if limit != "max":
                    free.append(max(0, int(limit) - int(used) + int(stat.get(cached, 0))))
            except (OSError, ValueError):
                continue
    return free


def free_memory(device: torch.device) -> int:
    """Memory that this process can use: free memory plus what it already holds; 0 if unknown."""
    if device.type == "cpu":
        try:
            with open("/proc/meminfo") as lines:
                available = next(line for line in lines if line.startswith("MemAvailable"))
            return int(available.split()[1]) * 1024 + memory_in_use(device)
        except (OSError, StopIteration):  # not on Linux
            return total_memory(device)
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return 0
    return int(module.mem_get_info(device)[0]) + int(module.memory_reserved(device))


def non_allocator_memory(device: torch.device) -> int:
    """Device memory in use outside torch's allocator: context and libraries; 0 on the CPU."""
    module = torch.get_device_module(device) if device.type != "cpu" else None
    if module is None or not hasattr(module, "mem_get_info"):
        return 0
    free, total = module.mem_get_info(device)
    return min(max(int(total - free) - int(module.memory_reserved(device)), 0), _MAX_CONTEXT_BYTES)


def resolve_budget(budget: str | int | None, device: torch.device) -> int | None:
    """Resolve a memory budget to bytes.

    Args:
        budget: A size such as "8GiB"; "auto" for the free memory of the device; None for no budget.
        device: Device that the budget applies to.

    Raises:
        RecipeError: The budget exceeds the memory of the device.
    """
    if budget is None:
        return None
    if budget == "auto":
        return free_memory(device) + non_allocator_memory(device) or None
    wanted, total = parse_bytes(budget), total_memory(device)
    if total and wanted > total:
        has = exact_bytes(total // 2**20 * 2**20)
        raise RecipeError(
            f"memory.budget is {format_bytes(wanted)}, but {device} has {format_bytes(total)}",
            f"set memory.budget: auto for the free memory, or at most {has}",
        )
    return wanted


class MemoryCap:
    """The memory budget of a process: enforced by the allocator on CUDA, a warning elsewhere.

    Args:
        device: Device of the run.
        budget_bytes: Memory that the process may use; None for no limit.
    """

    def __init__(self, device: torch.device, budget_bytes: int | None = None) -> None:
        self._device = device
        self.budget_bytes = budget_bytes
        self._has_warned = False

    def share(self, in_use: int) -> float | None:
        """The fraction of the budget in use; None without a budget. Logs once if the budget is exceeded."""
        if not self.budget_bytes:
            return None
        if in_use > self.budget_bytes and not self._has_warned:
            self._has_warned = True
            say(
                f"{format_bytes(in_use)} in use on {self._device}, more than memory.budget "
                f"({format_bytes(self.budget_bytes)}), which cannot be enforced on this device"
            )
        return in_use / self.budget_bytes


def cap_memory(device: torch.device, budget_bytes: int | None, outside_bytes: int = 0) -> MemoryCap:
    """Limit the memory of this process to a budget.

    On CUDA, allocations beyond the budget raise an out-of-memory error. On other devices nothing is enforced, and
    `MemoryCap.share` logs when the budget is exceeded.

    Args:
        device: Device of the run.
        budget_bytes: Memory that the process may use; None for no limit.
        outside_bytes: Part of the budget in use outside the allocator: see `non_allocator_memory`.

    Raises:
        RecipeError: The budget exceeds the memory of the device.
        DoesNotFit: Nothing of the budget is left for the allocator.
    """
    resolve_budget(budget_bytes, device)
    if device.type == "cuda" and budget_bytes is not None:
        if budget_bytes <= outside_bytes:
            raise DoesNotFit(
                f"memory.budget is {format_bytes(budget_bytes)}, but the CUDA context of {device} alone takes "
                f"{format_bytes(outside_bytes)}; set a larger memory.budget"
            )
        fraction = min((budget_bytes - outside_bytes) / total_memory(device), 1.0)
        torch.cuda.set_per_process_memory_fraction(fraction, device)
        _capped.add(device)
    elif device in _capped:  # lift the cap of an earlier run in this process, but not one that the user set
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        _capped.discard(device)
    return MemoryCap(device, budget_bytes)


def prefer_expandable_segments() -> bool:
    """Turn on expandable segments of the CUDA allocator, which reduce fragmentation.

    Call it before the first allocation: existing segments are not converted.

    Returns:
        Whether it was done. It is not if the user configured the allocator, or torch does not support expandable
        segments.
    """
    if not _can_prefer_expandable_segments():
        return False
    # torch 2.13 deprecates the name in torch.cuda; the environment variable was read when torch was imported
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return True


def has_expandable_segments() -> bool:
    """Whether a run in this process has expandable segments, even if it has not started yet.

    It does if the user's settings enable them, or if `prefer_expandable_segments` can enable them.
    """
    if not _knows_expandable_segments():
        return False
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", str)  # includes settings made at run time
    settings = [*(os.environ.get(name, "") for name in _ALLOCATOR_VARIABLES), str(read())]
    words = ",".join(settings).replace(" ", "").split(",")
    asked = [word.removeprefix("expandable_segments:") for word in words if word.startswith("expandable_segments:")]
    return asked[-1] == "True" if asked else _can_prefer_expandable_segments()


def _knows_expandable_segments() -> bool:
    return sys.platform == "linux" and torch.version.cuda is not None  # not on Windows or with ROCm


def _can_prefer_expandable_segments() -> bool:
    is_free = not any(name in os.environ for name in _ALLOCATOR_VARIABLES)
    return _knows_expandable_segments() and is_free and hasattr(torch._C, "_accelerator_setAllocatorSettings")


def keep_freed_memory() -> bool:
    """Let malloc keep large freed blocks instead of returning them to the system.

    By default glibc maps every large tensor with mmap and unmaps it when it is freed, so a training step on the CPU
    spends 10% of its time or more on page faults. With this setting the process keeps its peak memory, which the next
    step needs anyway.

    Returns:
        Whether it was done. It is only with glibc, and not if the user configured malloc in the environment.
    """
    if platform.libc_ver()[0] != "glibc" or any(name.startswith("MALLOC_") for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
    return bool(mallopt(mmap_threshold, 2**30)) and bool(mallopt(trim_threshold, 2**31 - 1))


def expected_non_allocator_memory(with_kernels: bool) -> int:
    """Predict the device memory outside torch's allocator during training: context and loaded kernels."""
    return _CONTEXT_BYTES + (_KERNELS_BYTES if with_kernels else 0)
