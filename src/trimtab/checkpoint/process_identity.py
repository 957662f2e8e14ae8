"""Tells whether a process that left its number somewhere is still running, or its number now belongs to another."""

import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_CLOCK_SLACK_S = 2.0  # the boot time is kept in whole seconds, and clocks are set


@dataclass(frozen=True)
class Process:
    """A process as others can recognise it: numbers are reused, so the moment at which it began belongs to it.

    Attributes:
        pid: Its number.
        host: The machine that it runs on.
        began: When it began, as text that only compares equal to itself; empty where the system does not tell.
    """

    pid: int
    host: str
    began: str

    @property
    def is_here(self) -> bool:
        """Whether it belongs to this machine, so that `is_running` can tell."""
        return self.host == socket.gethostname()

    def is_running(self) -> bool:
        """Whether it still runs on this machine; a number that another process has taken over does not count."""
        if not is_running(self.pid):
            return False
        began = _began(self.pid)
        return not self.began or not began or self.began == began  # in doubt it runs


def this_process() -> Process:
    """The process that asks."""
    return Process(os.getpid(), socket.gethostname(), _began(os.getpid()))


def is_running(pid: int) -> bool:
    """Whether a process of this number runs here. One that was killed and waits for its parent does not."""
    stat = _stat(pid)
    if stat:
        return stat[0] not in "ZX"
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is there, and not ours
        return True
    return True


def ran_at(pid: int, moment: float) -> bool:
    """Whether the process that has this number now runs, and did so at a moment in seconds since 1970."""
    if not is_running(pid):
        return False
    stat = _stat(pid)
    if not stat:
        return True  # the system does not say since when
    began = _boot_time() + int(stat[19]) / os.sysconf("SC_CLK_TCK")
    return began <= moment + _CLOCK_SLACK_S


def _began(pid: int) -> str:
    stat = _stat(pid)
    if stat:
        return f"{_boot_id()} {stat[19]}"
    if sys.platform == "darwin":
        told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
        return told.stdout.strip()
    return ""


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty where there is none. The name before may hold anything."""
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
