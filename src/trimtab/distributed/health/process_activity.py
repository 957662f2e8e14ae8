"""What can be seen of a process from outside: whether it is there, whether it moves, and where a thread stands.

Everything comes from /proc. Where that is missing (not Linux), nothing is known of other processes, and this one always
counts as moving: a wrong "it hangs" ends somebody's run, a missing one only costs patience.
"""

import os
import sys
from pathlib import Path
from typing import NamedTuple

CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
# A process that takes more than this in a second is at work. What an idle one takes anyway (this monitor, the polling
# threads of other libraries) stays well below; a slow download or a swapping process shows by bytes or page faults.
MOVING_CPU_SHARE = 0.03
MOVING_BYTES_A_SECOND = 16 * 1024
MOVING_PAGE_FAULTS_A_SECOND = 5
NUM_FRAMES = 5
DEBUGGER_FILES = {"pdb.py", "bdb.py"}  # the debuggers of IPython and others are built on them too


class Process(NamedTuple):
    """What one line of /proc/PID/stat says."""

    state: str  # R runs, S sleeps, D waits for a disk, T stopped, t held by a debugger, Z and X gone
    cpu_s: float
    num_page_faults: int  # those that had to read from a disk
    started: int  # in ticks after the host's start; with the pid it names a process for good

    @property
    def is_gone(self) -> bool:
        """It has ended, and nobody has collected it yet."""
        return self.state in "ZX"


class _Counters(NamedTuple):
    """All that a process has done since it started."""

    cpu_s: float = 0.0
    num_bytes: int = 0
    num_page_faults: int = 0


def find_process(pid: int) -> Process | None:
    """The process with this id, or None where it cannot be seen: it is over and collected, or there is no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name in front may hold spaces and brackets
    if len(fields) < 20:
        return None
    return Process(fields[0], (int(fields[11]) + int(fields[12])) * CLOCK_TICK_S, int(fields[9]), int(fields[19]))


def find_machine() -> str:
    """Equal for two processes exactly where each can look up the other's pid; empty where nobody can.

    A host's name is not enough: containers on one host may share it and still number their processes apart.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


class Activity:
    """How long a process and all its descendants have done (almost) nothing: no CPU time, bytes or page faults.

    Args:
        pid: The process to look at.
        ignored_thread: A thread of it whose bytes do not count: the one that reports to the others.
    """

    def __init__(self, pid: int, ignored_thread: int | None = None) -> None:
        self.idle_s = 0.0
        self._pid = pid
        self._ignored_thread = ignored_thread
        self._own: _Counters | None = None
        self._descendants: dict[int, _Counters] | None = None

    def pass_time(self, seconds: float) -> None:
        """Look again, `seconds` after the last look."""
        before, self._own = self._own, _count(self._pid, self._ignored_thread)
        if before is None or self._own is None or _moved(before, self._own, seconds):
            self.idle_s, self._descendants = 0.0, None
            return
        # Only now are descendants worth the reading: a main thread that waits for loader workers or a compiler.
        children_before, self._descendants = self._descendants, _count_descendants(self._pid)
        if self._descendants is None or (children_before is None and self._descendants):
            self.idle_s = 0.0
            return
        pairs = (((children_before or {}).get(pid, _Counters()), now) for pid, now in self._descendants.items())
        self.idle_s = 0.0 if any(_moved(*pair, seconds) for pair in pairs) else self.idle_s + seconds


def where_thread_stands(ident: int) -> tuple[str, bool]:
    """The innermost frames of a thread of this process ("training/loop.py:12 in fit"), and whether it is debugged."""
    frame = sys._current_frames().get(ident)
    places: list[str] = []
    in_debugger = False
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        in_debugger = in_debugger or path.name in DEBUGGER_FILES
        if len(places) < NUM_FRAMES:
            places.append(f"{path.parent.name}/{path.name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(places), in_debugger


def _count(pid: int, ignored_thread: int | None = None) -> _Counters | None:
    process = find_process(pid)
    if process is None:
        return None
    num_bytes = _num_bytes(f"/proc/{pid}/io")
    if ignored_thread is not None:
        num_bytes -= _num_bytes(f"/proc/{pid}/task/{ignored_thread}/io")
    return _Counters(process.cpu_s, num_bytes, process.num_page_faults)


def _num_bytes(path: str) -> int:
    """Read and written, from files and many kinds of sockets."""
    try:
        read, written = Path(path).read_text().splitlines()[:2]  # rchar and wchar
        return int(read.partition(":")[2]) + int(written.partition(":")[2])
    except (OSError, ValueError):
        return 0  # some kernels and containers hide it; CPU time alone has to do


def _moved(before: _Counters, after: _Counters, seconds: float) -> bool:
    return (
        after.cpu_s - before.cpu_s >= max(MOVING_CPU_SHARE * seconds, 1.5 * CLOCK_TICK_S)  # one tick may be rounding
        or after.num_bytes - before.num_bytes >= MOVING_BYTES_A_SECOND * seconds
        or after.num_page_faults - before.num_page_faults >= MOVING_PAGE_FAULTS_A_SECOND * seconds
    )


def _count_descendants(pid: int) -> dict[int, _Counters] | None:
    """All processes below this one, or None where the kernel does not list them."""
    if not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return None
    found: dict[int, _Counters] = {}
    rest = [pid]
    while rest:
        for child in _children(rest.pop()):
            counters = _count(child)
            if counters is not None and child not in found:
                found[child] = counters
                rest.append(child)
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            try:
                found.extend(int(child) for child in Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
            except OSError:
                continue  # a thread may end while we look
    except OSError:
        pass  # and so may the process
    return found
