"""The state and activity of a process, read from /proc, and the stack of a thread of this one.

Without /proc (not on Linux) nothing is known about other processes, and this one always counts as active: wrongly
reporting a hang ends a run, whereas missing one only delays an error until the timeout.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
# Above one of these rates a process is active. An idle one (this monitor, polling threads of other libraries) stays
# well below; a slow download shows in the bytes, swapping in the page faults.
ACTIVE_CPU_SHARE = 0.03
ACTIVE_BYTES_PER_S = 16 * 1024
ACTIVE_PAGE_FAULTS_PER_S = 5
NUM_FRAMES = 5
DEBUGGER_FILES = {"pdb.py", "bdb.py"}  # modules of debuggers; IPython's and others are built on them

_Counters = tuple[float, int, int]  # CPU seconds, bytes read and written, major page faults, since the process started


class Process(NamedTuple):
    """The fields of /proc/PID/stat that are used here."""

    state: str  # R running, S sleeping, D waiting for a disk, T stopped, t stopped by a debugger, Z and X dead
    cpu_s: float
    num_page_faults: int  # major page faults, which read from a disk
    started: int  # clock ticks since boot; with the pid it identifies a process uniquely


def find_process(pid: int) -> Process | None:
    """Read the state of a process; None if it does not exist or is hidden, or without /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the command name before it may contain spaces and brackets
    if len(fields) < 20:
        return None
    return Process(fields[0], (int(fields[11]) + int(fields[12])) * CLOCK_TICK_S, int(fields[9]), int(fields[19]))


def find_pid_namespace() -> str:
    """Identify the pid namespace: equal for two processes that can look up each other's pid; "" if it is unknown.

    The host name is not enough: containers on one host may share it and still have separate pids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class Activity:
    """How long a process and all its descendants have been idle: almost no CPU time, bytes or page faults.

    Args:
        pid: The process.
        ignored_thread: Native id of a thread whose bytes are not counted: the one that sends reports.
    """

    def __init__(self, pid: int, ignored_thread: int | None = None) -> None:
        self.idle_s = 0.0
        self._pid = pid
        self._ignored_thread = ignored_thread
        self._counters: dict[int, _Counters] = {}  # at the last look, by pid

    def pass_time(self, seconds: float) -> None:
        """Update `idle_s`, `seconds` after the last call."""
        before, self._counters = self._counters, {}

        def is_idle(pid: int, ignored_thread: int | None = None) -> bool:
            if (counters := _read_counters(pid, ignored_thread)) is None:
                return pid != self._pid  # a descendant that has just ended
            self._counters[pid] = counters
            return not _is_active(before.get(pid, (0.0, 0, 0)), counters, seconds)

        # Descendants (loader workers, a compiler) are looked up only if the process itself is idle.
        descendants = _find_descendants(self._pid) if is_idle(self._pid, self._ignored_thread) else None
        idle = descendants is not None and all([is_idle(child) for child in descendants])
        self.idle_s = self.idle_s + seconds if idle else 0.0


def describe_stack(thread: int) -> tuple[str, bool]:
    """Return the innermost frames of a thread ("training/loop.py:12 in fit < …"), and whether it is in a debugger."""
    frame = sys._current_frames().get(thread)
    lines: list[str] = []
    in_debugger = False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        in_debugger = in_debugger or path.name in DEBUGGER_FILES
        if len(lines) < NUM_FRAMES:
            lines.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(lines), in_debugger


def _read_counters(pid: int, ignored_thread: int | None = None) -> _Counters | None:
    process = find_process(pid)
    if process is None:
        return None
    num_bytes = _num_bytes(f"/proc/{pid}/io")
    if ignored_thread is not None:
        num_bytes -= _num_bytes(f"/proc/{pid}/task/{ignored_thread}/io")
    return process.cpu_s, num_bytes, process.num_page_faults


def _num_bytes(path: str) -> int:
    """Bytes read and written, from files and many kinds of sockets."""
    try:
        read, written = Path(path).read_text().splitlines()[:2]  # rchar and wchar
        return int(read.partition(":")[2]) + int(written.partition(":")[2])
    except (OSError, ValueError):
        return 0  # some kernels and containers hide it: then only CPU time and page faults count


def _is_active(before: _Counters, after: _Counters, seconds: float) -> bool:
    cpu_limit_s = max(ACTIVE_CPU_SHARE * seconds, 1.5 * CLOCK_TICK_S)  # a single tick may be rounding
    limits = (cpu_limit_s, ACTIVE_BYTES_PER_S * seconds, ACTIVE_PAGE_FAULTS_PER_S * seconds)
    return any(new - old >= limit for old, new, limit in zip(before, after, limits, strict=True))


def _find_descendants(pid: int) -> list[int] | None:
    """All processes below this one; None if the kernel does not list them."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return None
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            for child in map(int, path.read_text().split()):
                found += [child, *(_find_descendants(child) or ())]
    return found
