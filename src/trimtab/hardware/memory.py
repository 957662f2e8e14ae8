"""How much memory a run uses: the allocator's figure on an accelerator, the process's resident memory on the CPU."""

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
