"""Wait for gloo's threads, so that neither the end of a process group nor the end of Python meets one at work.

A collective that was started in backward holds a Python object. The thread of gloo that ran it releases that object
after it has woken the main thread, and needs the interpreter's lock for it. If the main thread meanwhile destroys the
group, it waits for the thread while it holds the lock: a deadlock. If Python finalizes, the thread cannot get the lock,
and C++ aborts the process.
"""

import time
from pathlib import Path

_THREADS = Path("/proc/self/task")
_LOOK_S = 0.02  # a thread that waits for the interpreter's lock wakes up several times in it (every 5 ms)


def wait_for_idle_gloo(timeout_s: float = 10.0) -> None:
    """Wait until all threads of gloo have been asleep for a while, in which nothing kept the lock from them."""
    deadline = time.monotonic() + timeout_s
    seen = _threads_of_gloo()
    while seen and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # without the interpreter's lock
        before, seen = seen, _threads_of_gloo()
        if seen == before and all(is_asleep for is_asleep, _ in seen.values()):
            return


def _threads_of_gloo() -> dict[str, tuple[bool, list[str]]]:
    """For each thread that runs collectives: whether it is asleep, and how often it was switched to and from."""
    found = {}
    for thread in _THREADS.glob("*"):  # empty where the system has no /proc
        try:
            lines = (thread / "status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
        if fields["Name"].startswith("pt_gloo"):
            switches = [value for name, value in fields.items() if name.endswith("_ctxt_switches")]
            found[thread.name] = fields["State"].startswith("S"), switches
    return found
