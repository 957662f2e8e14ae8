"""The peak of a process's resident memory since a chosen time: what a step really needs on a CPU.

Linux counts the peak and lets a process reset it. Other systems count it only since the process started, so a step
cannot be measured there.
"""

import ctypes
import gc
import os
import platform
from pathlib import Path

_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"  # see proc(5)


def can_measure_resident_peak() -> bool:
    """Whether this system can measure the peak of a part of the process's work."""
    return os.access(_RESET, os.W_OK) and _STATUS.exists()


def reset_resident_peak() -> None:
    """Return freed memory to the system, and start to measure the peak."""
    gc.collect()
    if platform.libc_ver()[0] == "glibc":  # malloc keeps freed blocks, which would count as in use
        ctypes.CDLL(None).malloc_trim(0)
    _RESET.write_text(_RESET_PEAK)


def resident_peak() -> int:
    """The largest resident memory in bytes since `reset_resident_peak`."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
