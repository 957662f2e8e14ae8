"""How much memory a run uses: the allocator's figure on an accelerator, the process's resident memory on the CPU."""

import ctypes
import os
import platform
import resource
import sys

import torch


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
