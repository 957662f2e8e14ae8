"""Runs a function of these tests on several ranks, started as a cluster or torchrun does it."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from forked import Child, ForkServer

HERE = Path(__file__).parent


def start_together(server: ForkServer, function: str, num_processes: int, **arguments: Any) -> list[Child]:
    """Start processes that run a function, with the variables that a cluster sets.

    Args:
        server: Starts them.
        function: MODULE:NAME.
        num_processes: World size.
        arguments: Of the function.
    """
    port = str(free_port())
    started = []
    for rank in range(num_processes):
        place = {"RANK": str(rank), "WORLD_SIZE": str(num_processes), "LOCAL_RANK": str(rank)}
        place |= {"LOCAL_WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(server.start(function, environment=place, **arguments))
    return started


def run_together(server: ForkServer, script: ModuleType, folder: Path, num_processes: int) -> None:
    """Run `main` of a script with the folder as its argument in several processes; every one has to succeed."""
    _finish(start_together(server, "launching:run_main", num_processes, script=script.__name__, folder=str(folder)))


def run_alone(server: ForkServer, script: ModuleType, folder: Path) -> None:
    """The same in one process."""
    _finish([server.start("launching:run_main", script=script.__name__, folder=str(folder))])


def run_both_ways(server: ForkServer, script: ModuleType, folder: Path) -> dict[tuple[int, int], Any]:
    """Run a script in one process and in two, and return what each saved, by (number of processes, rank).

    Args:
        server: Starts them.
        script: Its `main` saves to NUMBER-RANK.pt in the folder.
        folder: Argument of `main`.
    """
    run_alone(server, script, folder)
    run_together(server, script, folder, 2)
    return {(count, rank): torch.load(folder / f"{count}-{rank}.pt") for count, rank in [(1, 0), (2, 0), (2, 1)]}


def run_main(script: str, folder: str) -> None:
    """Entry point of each process."""
    __import__(script)
    sys.modules[script].main(Path(folder))


def _finish(started: list[Child], timeout: float = 600) -> None:
    end = time.monotonic() + timeout
    try:
        while None in (codes := [child.poll() for child in started]):
            assert time.monotonic() < end, "not done in time"
            assert all(code in (None, 0) for code in codes), codes
            time.sleep(0.01)
        assert not any(codes), codes
    except AssertionError as error:
        for child in started:
            child.kill()
        raise AssertionError("\n\n".join([str(error), *(child.said[-3000:] for child in started)])) from None


def run_by_torchrun(script: ModuleType, folder: Path, num_processes: int) -> None:
    """The same by torchrun itself, in processes that are not forked."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    search = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(script.__file__), str(folder)],
        env=os.environ | {"PYTHONPATH": search, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-6000:]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
