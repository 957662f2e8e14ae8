"""End a rank whose work is done without finalizing the interpreter.

Threads of gloo outlive `destroy_process_group`. One that releases the last reference to a tensor while Python finalizes
cannot take the interpreter's lock, and C++ aborts the process: the launcher would then report a rank that had finished
as killed by SIGABRT. Processes started by multiprocessing also end in this way.
"""

import atexit
import os
import sys
import threading
from contextlib import suppress

import torch.distributed as dist


def is_rank_of_many() -> bool:
    """Whether this process belongs to a process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def end_finished_rank() -> None:
    """Wait for the threads, run the exit functions, write all output, and end this process with exit code 0."""
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls first, for threads like the saver
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(0)
