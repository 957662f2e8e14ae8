"""Starts a script of these tests in several processes, with torchrun, and says what went wrong where one failed."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent


def environment() -> dict[str, str]:
    folders = os.pathsep.join([str(HERE), str(HERE.parent)])
    return os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"}


def run_together(script: ModuleType, folder: Path, num_processes: int, *, timeout: float = 240) -> str:
    """Run `script` with the folder as its argument in several processes; every one has to succeed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return _run([*command, str(script.__file__), str(folder)], timeout)


def run_alone(script: ModuleType, folder: Path, *, timeout: float = 240) -> str:
    """The same in one process."""
    return _run([sys.executable, str(script.__file__), str(folder)], timeout)


def _run(command: list[str], timeout: float) -> str:
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
