"""Starts a command that the kernel kills as soon as the process that started it is gone, however that one ended.

A launcher that gets SIGKILL cannot end the processes it has started, and torchrun gives each a session of its own: they
would train on, or wait for each other for minutes. Linux can send a process a signal at its parent's death; the setting
is lost at a fork and kept at an exec. So this file runs as a script in the new process, sets it, and becomes the
command: nothing has to run between fork and exec in a launcher that has threads. It imports nothing of trimtab.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def ending_with_parent(command: list[str]) -> list[str]:
    """The command line that starts `command` as a process that ends with this one; on other systems `command` itself.

    To be started by a thread that stays: at the end of the one that started it the kernel takes the parent for gone.
    """
    if sys.platform != "linux":
        return command
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *command]


def _end_with_parent(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it was gone before the kernel knew
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    _end_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
