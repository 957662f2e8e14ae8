"""Asynchronous saves: what is written is the state of the call, one save at a time, and failures are reported."""

import json
import logging
import subprocess
import sys
import threading
import time

import pytest
import torch

from trimtab.checkpoint import background as background_module
from trimtab.checkpoint.background import BackgroundWriter
from trimtab.checkpoint.codec import decode, encode
from trimtab.checkpoint.snapshot import Snapshots
from trimtab.checkpoint.store import StoredCheckpoint, find_checkpoint_problem, write_checkpoint


@pytest.fixture(autouse=True)
def _fresh_log(caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("trimtab.log._logged_once", set())


def parts_of(value):
    return {"p": encode(value)}


def saved(folder):
    stored = StoredCheckpoint(folder)
    return decode(stored.trees["p"], stored.tensor_reader("p"))


def said(caplog, words):
    return sum(words in message for message in caplog.messages)


class Gate:
    """Holds up every write until it is opened, and notes who writes what."""

    def __init__(self, monkeypatch):
        self.opened = threading.Event()
        self.threads, self.busy, self.most_at_once = [], 0, 0
        monkeypatch.setattr(background_module, "write_checkpoint", self._write)

    def _write(self, *arguments):
        self.busy += 1
        self.most_at_once = max(self.most_at_once, self.busy)
        self.threads.append(threading.current_thread().name)
        assert self.opened.wait(100)
        write_checkpoint(*arguments)
        self.busy -= 1


def test_what_is_written_is_the_state_of_the_call(tmp_path, monkeypatch):
    gate, writer = Gate(monkeypatch), BackgroundWriter()
    assert writer.last_seconds is None
    weight, facts = torch.ones(1000), {"metrics": {"loss": 1.0}}
    assert writer.save(tmp_path / "c", parts_of({"w": weight, "n": 1}), facts) is None
    assert writer.is_writing
    weight.zero_()  # training continues
    facts["metrics"]["loss"] = 2.0
    assert not (tmp_path / "c").exists()
    time.sleep(0.1)
    gate.opened.set()
    assert writer.wait() is None
    assert writer.last_seconds > 0.1
    assert not writer.is_writing
    assert (saved(tmp_path / "c")["w"] == 1).all()
    assert StoredCheckpoint(tmp_path / "c").facts == {"metrics": {"loss": 1.0}}
    assert gate.threads == ["trimtab-checkpoint"]


@pytest.mark.parametrize(("worth_reporting_s", "num_lines"), [(0.0, 1), (1e9, 0)])
def test_a_save_that_still_runs_is_waited_for_and_that_is_reported(
    worth_reporting_s, num_lines, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(background_module, "_WORTH_REPORTING_S", worth_reporting_s)
    gate, writer = Gate(monkeypatch), BackgroundWriter()
    for step in range(3):
        if step == 1:
            threading.Timer(0.15, gate.opened.set).start()
        writer.save(tmp_path / f"step-{step}", parts_of({"x": torch.full((9,), step)}))
    writer.wait()
    assert gate.most_at_once == 1
    for step in range(3):
        assert (saved(tmp_path / f"step-{step}")["x"] == step).all(), "a save was skipped, or overwritten by the next"
    assert said(caplog, "for the previous checkpoint to be written") == num_lines


def test_what_comes_after_a_save(tmp_path, caplog):
    """Retention and the mirror, which run on the same thread, and cannot undo a save by failing."""
    done = []

    def after(folder):
        done.append((folder, threading.current_thread().name, find_checkpoint_problem(folder)))
        raise RuntimeError("no such mirror")

    writer = BackgroundWriter(on_saved=after)
    writer.save(tmp_path / "c", parts_of({"x": torch.ones(3)}))
    assert writer.wait() is None
    assert done == [(tmp_path / "c", "trimtab-checkpoint", "")]
    assert said(caplog, "after saving a checkpoint: RuntimeError no such mirror") == 1


# ---------------------------------------------------------------------- failures


def test_a_failure_is_reported_and_the_next_save_tries_again(tmp_path, file_size_limit, caplog, monkeypatch):
    saves = []
    writer = BackgroundWriter(on_saved=saves.append)
    writer.save(tmp_path / "step-1", parts_of({"x": torch.ones(3)}))
    writer.wait()
    first_seconds = writer.last_seconds
    with file_size_limit(10_000):
        assert writer.save(tmp_path / "step-2", parts_of({"x": torch.ones(9000)})) is None
        failure = writer.wait()
    assert "step-2 could not be written: File too large" in failure.problem
    assert said(caplog, "saving a checkpoint failed, training continues") == 1
    assert writer.failure is failure
    assert writer.last_seconds == first_seconds
    assert {path.name for path in tmp_path.iterdir()} == {"step-1"}, "a partial folder was left"
    assert find_checkpoint_problem(tmp_path / "step-1") == ""
    assert writer.save(tmp_path / "step-3", parts_of({"x": torch.ones(9000)})) is failure, "the next call returns it"
    assert writer.wait() is None
    assert writer.failure is None
    assert saves == [tmp_path / "step-1", tmp_path / "step-3"]
    # a bug of trimtab is a failure like any other
    monkeypatch.setattr(background_module, "write_checkpoint", lambda *_: 1 / 0)
    writer.save(tmp_path / "step-4", parts_of({"x": torch.ones(3)}))
    failure = writer.wait()
    assert "step-4 could not be written: ZeroDivisionError" in failure.problem
    assert isinstance(failure.__cause__, ZeroDivisionError)


# ---------------------------------------------------------------------- without memory for a snapshot


def test_in_the_foreground_where_memory_is_short(tmp_path, monkeypatch, caplog, file_size_limit):
    gate = Gate(monkeypatch)
    gate.opened.set()
    writer = BackgroundWriter(free_memory=lambda: 1000)
    for step in range(3):
        assert writer.save(tmp_path / f"step-{step}", parts_of({"x": torch.full((900,), step)})) is None
        assert not writer.is_writing
        assert (saved(tmp_path / f"step-{step}")["x"] == step).all()
    assert set(gate.threads) == {threading.current_thread().name}
    assert writer._snapshots.num_bytes_held == 0
    assert said(caplog, "checkpoints are written synchronously") == 1
    assert writer.last_seconds > 0
    with file_size_limit(100):
        failure = writer.save(tmp_path / "step-9", parts_of({"x": torch.ones(900)}))
    assert "File too large" in failure.problem
    assert writer.failure is failure


@pytest.mark.parametrize(("free", "held"), [(64 * 2**20, 0), (90 * 2**20, 1), (None, 1)])
def test_a_part_of_what_is_free_stays_free(tmp_path, free, held):
    """A snapshot takes one slab of 64 MiB here."""
    writer = BackgroundWriter(free_memory=lambda: free)
    writer.save(tmp_path / "c", parts_of({"x": torch.ones(9)}))
    writer.wait()
    assert writer._snapshots.num_bytes_held == held * 64 * 2**20
    writer._free_memory = lambda: 0  # what is held already is not asked for again
    writer.save(tmp_path / "c", parts_of({"x": torch.ones(9)}))
    writer.close()
    assert writer._snapshots.num_bytes_held == 0


def test_memory_that_does_not_suffice_is_given_back(tmp_path):
    """It would only make memory shorter still."""
    writer = BackgroundWriter(free_memory=lambda: 10_000)
    writer._snapshots = Snapshots(1000)
    held = []
    for num_values in (20, 20_000, 20):
        writer.save(tmp_path / "c", parts_of({"x": torch.ones(num_values)}))
        writer.wait()
        held.append(writer._snapshots.num_bytes_held)
        assert len(saved(tmp_path / "c")["x"]) == num_values
    assert held == [1000, 0, 1000]


MEMORY = """
import json, resource, sys, threading, time
import torch
from trimtab.checkpoint.background import BackgroundWriter
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.store import find_checkpoint_problem

MIB, home = 2**20, sys.argv[1]
tensors = [torch.ones(1024, 2048).t() for _ in range(5)]  # 8 MiB each, and not contiguous: a file needs a copy

def pages(index):
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[index]) * resource.getpagesize() / MIB

def save(writer, in_background):
    assert writer.save(home, {"p": encode({str(i): tensor for i, tensor in enumerate(tensors)})}) is None
    assert writer.is_writing == in_background
    assert writer.wait() is None
    return pages(1)

def watch():
    while not stop.is_set():
        found["foreground"] = max(found["foreground"], pages(1) - before)
        time.sleep(0.001)

BackgroundWriter(free_memory=lambda: 0).save(home, {"p": encode({"x": torch.ones(9, 9).t()})})  # what torch loads late
before, found, stop = pages(1), {"foreground": 0.0}, threading.Event()
watcher = threading.Thread(target=watch)
watcher.start()
save(BackgroundWriter(free_memory=lambda: 0), in_background=False)
stop.set()
watcher.join()

writer = BackgroundWriter(free_memory=lambda: None)
before = pages(1)
sizes = [save(writer, in_background=True) for _ in range(3)]
found["first in background"], found["growth"] = sizes[0] - before, sizes[-1] - sizes[0]
writer.close()

resource.setrlimit(resource.RLIMIT_AS, (int((pages(0) + 40) * MIB), resource.RLIM_INFINITY))
save(BackgroundWriter(free_memory=lambda: None), in_background=False)
assert find_checkpoint_problem(home) == ""
print(json.dumps(found))
"""


def in_a_process(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and other systems do not refuse memory in this way")
def test_the_memory_of_saves(tmp_path):
    """40 MiB of state: the foreground takes less than one tensor more, the background one copy and no more.

    And where the system refuses the memory of the copy, after all, the save is done in the foreground.
    """
    code, out, errors = in_a_process(MEMORY, tmp_path / "a")
    assert code == 0, errors
    found = json.loads(out)
    assert found["foreground"] < 8
    assert 36 < found["first in background"] < 64
    assert found["growth"] < 4
    assert errors.count("too little host memory for a snapshot (64.0 MiB needed)") == 3


# ---------------------------------------------------------------------- the end of the program

ENDS = """
import sys, time
import torch
from trimtab.checkpoint import background
from trimtab.checkpoint.codec import encode
plain = background.write_checkpoint
def slow(*arguments):
    time.sleep(0.3)
    plain(*arguments)
background.write_checkpoint = slow
background.BackgroundWriter().save(sys.argv[1], {"p": encode({"x": torch.ones(2_000_000)})})
raise ValueError("the training failed")
"""


@pytest.mark.slow
def test_a_program_that_fails_ends_after_its_last_save(tmp_path):
    code, _, errors = in_a_process(ENDS, tmp_path / "c")
    assert code == 1
    assert "the training failed" in errors
    assert find_checkpoint_problem(tmp_path / "c") == ""
