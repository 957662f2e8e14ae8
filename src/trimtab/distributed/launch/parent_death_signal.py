"""Start a command that the kernel kills as soon as the process that started it has ended, for any reason.

A launcher that gets SIGKILL cannot end its processes, and torchrun starts each in a new session: they would continue to
train, or wait for each other for minutes. Linux can send a process a signal when its parent dies; the setting is lost
at a fork and kept at an exec. So this file runs as a script in the new process, sets it, and execs the command: no code
has to run between fork and exec in a launcher that has threads. It imports nothing from trimtab.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def add_parent_death_signal(command: list[str]) -> list[str]:
    """Return the command line that runs `command` as a process that ends with this one; unchanged if not on Linux.

    The thread that starts it must stay alive: for the kernel, the end of that thread is the end of the parent.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _set_parent_death_signal(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _set_parent_death_signal(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
