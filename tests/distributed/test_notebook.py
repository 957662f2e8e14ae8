"""`trimtab.launch`: functions of the `__main__` of a script or notebook on two processes, and their results."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import trimtab
from trimtab.distributed.launch.notebook import ERROR, _results
from trimtab.errors import PeerError, RecipeError

# One script for everything: each launch takes seconds. Nothing in it is importable by the processes.
SCRIPT = """
import atexit, dataclasses, os, sys, threading, time
import torch
import torch.distributed as dist
import beside
import trimtab
from beside import twice

scale = 10
unpicklable = open(os.devnull)


@dataclasses.dataclass
class Outcome:
    rank: int
    total: float


class AbortsLate:
    def __del__(self):  # as a thread of gloo does now and then
        if sys.is_finalizing():
            os.abort()


def write_late(name):
    time.sleep(0.5)
    open(name, "a").write("written")


def scaled(value):
    return beside.twice(value) * scale


def train(start, *, plus):
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + start)])
    dist.all_reduce(total)
    print("rank", dist.get_rank(), "speaks")
    dist.destroy_process_group()
    sys.modules["torch"].kept = AbortsLate()
    rank = os.environ["RANK"]
    threading.Thread(target=write_late, args=("thread" + rank,)).start()
    atexit.register(write_late, "atexit" + rank)
    outcome = Outcome(int(os.environ["RANK"]), scaled(total.item()) + plus)
    return outcome, torch.arange(2), {"launched": "RANK" in os.environ}


torch.ones(64, 64) @ torch.ones(64, 64)  # OpenMP is in use here, as it is in a notebook
found = trimtab.launch(train, (1,), {"plus": 0.5}, processes=2)
assert [outcome for outcome, _, _ in found] == [Outcome(0, 60.5), Outcome(1, 60.5)], found
for name in ("thread0", "thread1", "atexit0", "atexit1"):
    assert open(name).read() == "written"
assert all(type(outcome) is Outcome for outcome, _, _ in found)
assert all(tensor.tolist() == [0, 1] and facts == {"launched": True} for _, tensor, facts in found)


def fails():
    if os.environ["RANK"] == "1":
        raise KeyError("gone")
    time.sleep(600)  # until torchrun ends it because of rank 1


try:
    trimtab.launch(fails, processes=2)
except trimtab.TrimtabError as error:
    print("caught", type(error).__name__, error)
"""


@pytest.mark.slow
def test_functions_of_main(own_folder):
    """Return values in rank order, as instances of the caller's class; then the exception of the rank that failed."""
    beside = own_folder / "elsewhere"
    beside.mkdir()
    # A module of one's own, beside the script, with something in it that no process can send to another.
    (beside / "beside.py").write_text(
        "import threading\n\nlock = threading.Lock()\n\n\ndef twice(value):\n    return 2 * value\n"
    )
    (beside / "script.py").write_text(SCRIPT)
    Path("launch.yaml").write_text("hosts: [node1, node2]\n")  # of `trimtab launch`, not meant for a function
    script = str(beside / "script.py")  # its own folder is on its path; that of the processes it starts is not
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "rank 0 speaks"
    assert "rank 1 speaks" not in done.stdout
    assert "caught PeerError rank 1 failed: KeyError: 'gone'" in lines
    assert any("in fails" in line for line in lines)  # its traceback
    (log,) = [path for path in Path("runs/logs").rglob("1/stdout.log") if path.read_text()]
    assert log.read_text() == "rank 1 speaks\n"


def test_what_cannot_be_launched(own_folder, monkeypatch):
    with pytest.raises(RecipeError, match="launch takes a function, found 3"):
        trimtab.launch(3)
    with pytest.raises(RecipeError, match="--processes: found 0"):
        trimtab.launch(print, processes=0)
    held = (number for number in range(3))
    with pytest.raises(RecipeError, match="cannot be sent to other processes: TypeError: .*generator"):
        trimtab.launch(lambda: next(held))
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RecipeError, match="rank 1 of 2, which is already launched"):
        trimtab.launch(print)
    assert list(own_folder.iterdir()) == []


@pytest.mark.slow
def test_a_process_that_just_ends(own_folder, capfd):
    """An exit without an exception, as by a library in C."""
    with pytest.raises(PeerError, match="rank 0 ended with exit code 3"):
        trimtab.launch(os._exit, (3,), processes=1)
    with pytest.raises(PeerError, match="rank 0 ended without a result"):  # sys.exit() in the function
        _results(own_folder, 1, 0, [])


def test_of_several_that_failed_the_first_is_named(own_folder):
    for moment, rank in enumerate((1, 0), start=1):
        path = own_folder / ERROR.format(rank)
        path.write_text(f"of rank {rank}")
        os.utime(path, (moment, moment))
    with pytest.raises(PeerError, match="rank 1 failed: of rank 1"):
        _results(own_folder, 2, 1, [])
