"""Identity of a process, which distinguishes it from a later process with the same id."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CLOCK_TOLERANCE_S = 2.0  # the boot time has a resolution of one second, and clocks are adjusted


@dataclass(frozen=True)
class Process:
    """A process, identified by its start time in addition to its id, because ids are reused.

    Attributes:
        pid: Its process id.
        host: The name of its machine.
        began: Its start time as text that is only compared for equality; empty if the system does not report it.
    """

    pid: int
    host: str
    began: str

    @property
    def is_here(self) -> bool:
        """Whether the process belongs to this machine, which `is_running` requires."""
        return self.host == socket.gethostname()

    def is_running(self) -> bool:
        """Whether it still runs on this machine; another process with the same id does not count."""
        if not is_running(self.pid):
            return False
        began = _began(self.pid)
        return not self.began or not began or self.began == began  # assume that it runs if the start time is unknown


def this_process() -> Process:
    """Return the current process."""
    return Process(os.getpid(), socket.gethostname(), _began(os.getpid()))


def is_running(pid: int) -> bool:
    """Whether a process with this id runs on this machine; a zombie does not count."""
    stat = _stat(pid)
    if stat:
        return stat[0] not in "ZX"
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


def was_running_at(pid: int, time_s: float) -> bool:
    """Whether the process with this id runs now and already ran at a time, in seconds since the epoch."""
    if not is_running(pid):
        return False
    stat = _stat(pid)
    if not stat:
        return True  # the system does not report start times
    began = _boot_time() + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return began <= time_s + _CLOCK_TOLERANCE_S


def _began(pid: int) -> str:
    stat = _stat(pid)
    if stat:
        return f"{_boot_id()} {stat[19]}"
    if sys.platform == "darwin":
        listed = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return listed.stdout.strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the process name, which can contain any character; else nothing."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _boot_time() -> float:
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith("btime "):
            return float(line.split()[1])
    return 0.0
