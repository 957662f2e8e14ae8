"""Call a function in a forked process with limited memory and time, for code that comes with a model or data.

A chat template is such code: one line of it can run for days or fill the memory, within a single call that no thread
can interrupt. Systems other than Linux have no such limits; the function is called in this process there.
"""

import gc
import multiprocessing
import os
import resource
import signal
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

_MEMORY_BYTES = 2**30  # in addition to what this process has mapped
_CPU_S = 5.0  # of one call
_WALL_S = 600.0  # of one call; only a process that is stopped or starved takes so long


class LimitExceeded(Exception):
    """A call needed more memory or time than allowed."""


class LimitedProcess:
    """Calls a function in a forked process, which ends with the context.

    An exception of the function is raised as a `LimitExceeded` if it ran out of memory, else as a `RuntimeError` with
    its class name and message.

    Args:
        function: The function; the process has a copy of everything that it refers to.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._pid: int | None = None
        self._pipe: Any = None

    def __enter__(self) -> "LimitedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, *arguments: Any) -> Any:
        """Call the function; arguments and result are pickled."""
        if self._pid is None:
            if sys.platform != "linux":
                return self._call_here(*arguments)
            self._start()
        try:
            self._pipe.send(arguments)
            has_answer = self._pipe.poll(_WALL_S)
            problem, value = self._pipe.recv() if has_answer else (TimeoutError.__name__, None)
        except (EOFError, OSError):  # it was killed
            problem, value = (TimeoutError if self._end() == signal.SIGPROF else MemoryError).__name__, None
        except BaseException:  # such as Ctrl-C: an answer may still come
            self._end()
            raise
        if problem == TimeoutError.__name__:
            self._end()
            raise LimitExceeded(f"{_CPU_S:.0f} s")
        if problem == MemoryError.__name__:
            raise LimitExceeded("1 GiB of memory")
        if problem:
            raise RuntimeError(value)
        return value

    def _call_here(self, *arguments: Any) -> Any:
        try:
            return self._function(*arguments)
        except MemoryError as error:
            raise LimitExceeded("the memory of this machine") from error

    def _start(self) -> None:
        self._pipe, others = multiprocessing.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process may have threads
            self._pid = os.fork()
        if self._pid == 0:
            _serve(self._function, others)
        others.close()

    def _end(self) -> int:
        """End the process, and return the signal that ended it: an earlier one if it was already ending."""
        if self._pid is None:
            return 0
        os.kill(self._pid, signal.SIGKILL)
        _, status = os.waitpid(self._pid, 0)
        self._pipe.close()
        self._pid = None
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _serve(function: Callable[..., Any], pipe: Any) -> None:
    """Answer calls until the pipe is closed; never returns."""
    try:
        gc.freeze()  # the collector must neither visit nor end objects of the other process
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPROF):
            signal.signal(number, signal.SIG_DFL)
        _close_all_but(pipe.fileno())
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = mapped + _MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        while True:
            arguments = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, _CPU_S)
            try:
                answer = "", function(*arguments)
            except Exception as error:
                kind = type(error).__name__
                answer = kind, f"{kind}: {error}"[:2000]
            signal.setitimer(signal.ITIMER_PROF, 0)
            pipe.send(answer)
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Close the files of the other process, such as pipes whose other ends wait until they are closed."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number != kept:
            with suppress(OSError):  # that of the list itself
                os.close(number)
