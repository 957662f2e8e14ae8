"""Monitors in one process, then real processes that are lost in each way, with timeouts of seconds.

The processes are forked from one that has imported torch (this file as a script).
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from trimtab.distributed.health import monitor as monitor_module
from trimtab.distributed.health.monitor import Monitor, PeerMonitor
from trimtab.distributed.health.rules import DEADLOCK
from trimtab.errors import PeerError, RecipeError


def until(condition, seconds=100.0):
    """Wait; the time only guards against waiting for good."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# ---------------------------------------------------------------------- monitors in one process

QUICK = {"lost_after_s": 2.0, "idle_after_s": 3.0, "timeout_s": 60.0}


@pytest.fixture
def monitors(monkeypatch):
    """Two in this process, which must not end it."""
    monkeypatch.setattr(PeerMonitor, "_abort", lambda monitor, verb, fault: None)
    store = dist.HashStore()
    pair = [PeerMonitor(dist.PrefixStore("m", store), rank, 2, **QUICK) for rank in range(2)]
    for monitor in pair:
        monitor.start()
        monitor.start()  # has been done
    yield pair
    for monitor in pair:
        monitor.stop()
        monitor.stop()
    assert not [thread for thread in threading.enumerate() if thread.name in ("trimtab-monitor", "trimtab-exchange")]


def both(first, second):
    """Two main threads; what each raised."""
    raised = [None, None]

    def call(index, function):
        try:
            function()
        except Exception as error:
            raised[index] = error

    threads = [threading.Thread(target=call, args=pair) for pair in enumerate((first, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
        assert not thread.is_alive()
    return raised


def test_meeting(monitors):
    def meet_often(monitor):
        for _ in range(50):
            monitor.meet("save_state")

    assert both(lambda: meet_often(monitors[0]), lambda: meet_often(monitors[1])) == [None, None]
    first, second = both(lambda: monitors[0].meet("save_state"), lambda: monitors[1].meet("load_state"))
    assert isinstance(first, PeerError)
    assert str(first) == "rank 0 is in save_state, rank 1 in load_state" + DEADLOCK
    assert str(second) == "rank 1 is in load_state, rank 0 in save_state" + DEADLOCK


def test_meeting_with_one_who_failed_ended_or_waits_elsewhere(monitors):
    def wait_elsewhere():
        monitors[1].did("step 3: forward")
        with monitors[1].waiting("backward"):
            until(lambda: error[0] is not None)

    error = [None]

    def meet():
        try:
            monitors[0].meet("save_state")
        except PeerError as found:
            error[0] = found

    both(meet, wait_elsewhere)
    assert str(error[0]) == ("rank 0 is in save_state, rank 1 in backward (step 3: forward)" + DEADLOCK)
    monitors[1].failed(ValueError("no such label\nmore"))
    monitors[1].stop()
    with pytest.raises(PeerError, match="rank 1 failed: ValueError: no such label; last progress: step 3: forward"):
        monitors[0].meet("save_state")
    monitors[0].stop()
    with pytest.raises(PeerError, match="its monitor is not running"):
        monitors[0].meet("save_state")


def test_explaining(monitors, monkeypatch):
    original = PeerError("known")
    assert monitors[0].explain(original) is original
    began = time.monotonic()
    error = monitors[0].explain(RuntimeError("Invalid scalar type\nmore"))
    assert time.monotonic() - began >= monitor_module.EXPLAIN_S
    assert str(error) == (
        "a collective failed in rank 0, and all other ranks are alive: RuntimeError: Invalid scalar type"
    )
    monitors[1].failed(KeyError("x"))
    monkeypatch.setattr(monitor_module, "EXPLAIN_S", 3600.0)  # what is known already is not waited for
    error = monitors[0].explain(RuntimeError("Connection closed by peer [127.0.0.1]:123"))
    assert "rank 1 failed: KeyError: 'x'; last progress: none" in str(error)
    assert "rank 0 noticed it by RuntimeError: Connection closed by peer" in str(error)


def test_a_forked_child_does_not_speak_for_its_parent(monitors):
    child = os.fork()
    if child == 0:
        monitors[1].failed(ValueError("child"))
        monitors[1].stop()
        os._exit(0 if not monitors[1]._end else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert both(lambda: monitors[0].meet("a"), lambda: monitors[1].meet("a")) == [None, None]


def test_nested_collectives_count_alike(monitors):
    monitor = monitors[0]
    with monitor.waiting("outer"):
        with monitor.waiting("inner"):
            assert monitor._state[:4] == ("collective", "inner", 2, 2)
        assert monitor._state[:4] == ("collective", "outer", 1, 2)
        with monitor.long("reading"):
            assert monitor._state.kind == "long"
    assert monitor._state == ("", "", 0, 2, False)
    with contextlib.suppress(ValueError), monitor.waiting("outer"):
        raise ValueError
    assert monitor._state == ("", "", 0, 2, False), "it may be tried again"


def test_patience_of_the_user(monkeypatch):
    def timeouts():
        return PeerMonitor(dist.HashStore(), 0, 2)._peers.timeouts

    assert max(timeouts().lost_s, timeouts().idle_s) + 5 * timeouts().interval_s <= 30, "a fault is named within 30 s"
    for text, expected in (("1h", (10, 3600, 3600)), ("5", (10, 18, 5))):
        monkeypatch.setenv("TRIMTAB_PATIENCE", text)
        assert timeouts() == expected
    monkeypatch.setenv("TRIMTAB_PATIENCE", "forever")
    with pytest.raises(RecipeError, match="TRIMTAB_PATIENCE='forever' is not a duration"):
        timeouts()


def test_the_monitor_of_one_process_does_nothing():
    alone = Monitor()
    alone.start()
    alone.did("x")
    with alone.waiting("x"), alone.long("y"):
        alone.meet("x")
    alone.failed(ValueError("x"))
    assert str(alone.explain(ValueError("x"))) == "ValueError: x"
    alone.stop()


def test_the_main_thread_only_takes_notes():
    """A step takes no lock, calls no store and wakes no thread, each of which would cost time."""
    monitor = PeerMonitor(dist.HashStore(), 0, 2)
    monitor._pid = os.getpid()  # as after the start
    monitor._peers = monitor._exchange = monitor._store = None
    monitor.did("step 12: forward")
    with monitor.waiting("gather"):
        assert monitor._state.operation == "gather"


# ---------------------------------------------------------------------- real processes


@dataclass
class Role:
    """One process of a scenario."""

    name: str
    rank: int
    monitor: PeerMonitor
    store: dist.Store
    folder: Path
    num_processes: int

    def fault(self):
        """From now on the others should notice."""
        (self.folder / f"{self.name}.fault").touch()

    def report(self):
        """Wait until what was done last has been reported, and give the others time to read it."""
        self.monitor._exchange.report_now(100)
        time.sleep(2.5 * self.monitor._interval_s)

    def join_gloo(self):
        where = {"rank": self.rank, "world_size": self.num_processes}
        dist.init_process_group("gloo", store=dist.PrefixStore("gloo", self.store), **where)

    def gather(self):
        """A collective as the run has it: what it raises is explained."""
        try:
            with self.monitor.waiting("gather"):
                dist.all_reduce(torch.zeros(1))
        except RuntimeError as error:
            raise self.monitor.explain(error) from error

    def stuck(self, verb="gather"):
        """A collective that never raises, as on a GPU."""
        with self.monitor.waiting(verb):
            time.sleep(100)

    def two_steps(self):
        self.join_gloo()
        for step in (1, 2):
            self.monitor.did(f"step {step}: forward")
            self.gather()
        self.monitor.did("step 3: forward")

    def all_well(self):
        """All came. Most end quickly here; how an interpreter ends is seen in `busy`, `exits` and others."""
        self.monitor.meet("end")
        self.monitor.stop()
        if self.name != "busy":
            os._exit(0)
        dist.destroy_process_group()


def killed(role):
    role.two_steps()
    if role.rank == 1:
        role.report()
        role.fault()
        os.kill(os.getpid(), signal.SIGKILL)
    role.gather()


def killed_without_error(role):
    role.monitor.did("step 3: forward")
    role.monitor.meet("begin")
    if role.rank == 1:
        role.report()
        role.fault()
        os.kill(os.getpid(), signal.SIGKILL)
    role.stuck()


def stopped(role):
    role.two_steps()
    if role.rank == 1:
        role.report()
        role.fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    role.gather()


def raises_without_error(role):
    role.monitor.meet("begin")
    if role.rank == 1:
        role.fault()
        raise ValueError("no such label")
    role.stuck()


def ends(role):
    role.two_steps()
    if role.rank == 1:
        role.fault()
        return
    role.gather()


def store_stopped(role):
    """Rank 0 holds the store, as without torchrun; every call to it blocks for good."""
    if role.rank == 0:
        role.monitor.meet("begin")
        role.report()
        role.fault()
        os.kill(os.getpid(), signal.SIGSTOP)
    role.monitor.meet("begin")
    if role.rank == 1:
        role.monitor.meet("save_state")  # stuck in a call to the store, where nothing can be raised
    time.sleep(3)  # rank 2 just ends, although its thread is stuck


def store_killed(role):
    role.monitor.did("step 3: forward")
    role.monitor.meet("begin")
    if role.rank == 0:
        role.report()
        role.fault()
        os.kill(os.getpid(), signal.SIGKILL)
    if role.rank == 1:
        role.stuck()
    time.sleep(3)


def compute(seconds):
    """In Python, so that other threads run, and for a fifth of the time, so that other scenarios run."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        sum(range(500_000))
        time.sleep(0.04)


def busy(role):
    role.two_steps()
    if role.rank == 1:
        compute(5)
    role.gather()
    role.all_well()


def holds_the_lock(role):
    role.two_steps()
    if role.rank == 1:
        began_s = time.monotonic()
        sum(range(5_000_000))
        num_rounds = 5_000_000 * 6 / (time.monotonic() - began_s)
        sum(range(int(num_rounds)))  # one call of about 6 s, in which no other thread runs
    role.gather()
    role.all_well()


def waits_for_child(role):
    role.two_steps()
    if role.rank == 1:
        child = os.fork()
        if child == 0:
            compute(5)
            os._exit(0)
        os.waitpid(child, 0)
    role.gather()
    role.all_well()


def long(role):
    role.two_steps()
    if role.rank == 1:
        with role.monitor.long("tokenizing"):
            time.sleep(3)
            ctypes.PyDLL(None).sleep(4)
    role.gather()
    role.all_well()


def steps_with_pauses(role):
    """Little work, but it comes forward."""
    role.two_steps()
    if role.rank == 1:
        for step in range(6):
            role.monitor.did(f"step {step}")
            time.sleep(1)
    role.gather()
    role.all_well()


def suspended(role):
    """All are stopped for longer than any patience, and wake one after the other."""
    role.two_steps()
    (role.folder / f"suspended-{role.rank}.ready").touch()
    if role.rank == 1:
        compute(3)
    role.gather()
    role.all_well()


def exits(role):
    """Ends by the exit handler alone; its last report is out."""
    role.monitor.meet("begin")
    if role.rank == 1:
        (role.folder / "exits.gone").touch()
        return
    until(lambda: (role.folder / "exits.gone").exists())
    try:
        role.monitor.meet("again")
    except PeerError as error:
        print(error)


QUICKLY_SEEN = [killed, raises_without_error, exits]
FAULTS = [killed_without_error, stopped, ends, store_stopped, store_killed]
ENDS_BY_ITSELF = {"raises_without_error", "ends"}
FALSE_ALARMS = [busy, holds_the_lock, waits_for_child, long, steps_with_pauses, suspended]
SCENARIOS = {scenario.__name__: scenario for scenario in QUICKLY_SEEN + FAULTS + FALSE_ALARMS}
NUM_PROCESSES = {"killed": 3, "stopped": 3, "store_stopped": 3, "store_killed": 3}


def play(name, rank, folder):
    """One process of a scenario; returns to the top level, so that the interpreter ends as it always does."""
    num_processes = NUM_PROCESSES.get(name, 2)
    own, gloo = open_stores(name, rank, folder)
    monitor = PeerMonitor(dist.PrefixStore("monitor", own), rank, num_processes, **QUICK)
    monitor.start()

    def told(kind, error, trace):
        monitor.failed(error)
        traceback.print_exception(kind, error, trace)

    sys.excepthook = told
    SCENARIOS[name](Role(name, rank, monitor, gloo, folder, num_processes))


def open_stores(name, rank, folder):
    """Two connections. Over TCP only where that matters: torch asks the name server about each one, and while that
    takes its time (5 s, where one packet is lost) the whole store stands still.
    """
    if not name.startswith("store_"):
        return dist.FileStore(str(folder / f"{name}.store"), -1), dist.FileStore(str(folder / f"{name}.store"), -1)
    place = folder / f"{name}.port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place.with_suffix(".new").write_text(str(store.port))
        place.with_suffix(".new").rename(place)
    else:
        until(place.exists)
        store = dist.TCPStore("127.0.0.1", int(place.read_text()), is_master=False, wait_for_workers=False)
    return store, store


def nursery(folder, waves):
    """Fork all processes of a wave of scenarios, wait for them, note how each ended; then the next wave."""
    ends = {}
    for names in waves:
        running = {}
        for name in names:
            for rank in range(NUM_PROCESSES.get(name, 2)):
                pid = os.fork()
                if pid == 0:
                    for stream, suffix in ((sys.stdout, "out"), (sys.stderr, "err")):
                        target = os.open(folder / f"{name}-{rank}.{suffix}", os.O_WRONLY | os.O_CREAT, 0o600)
                        os.dup2(target, stream.fileno())
                    return play(name, rank, folder)
                running[pid] = (name, rank)
        pids = [pid for pid, (name, _) in running.items() if name == "suspended"]
        threading.Thread(target=suspend_all, args=(pids, folder)).start()
        collect(running, folder, ends)
    (folder / "ends.json").write_text(json.dumps(ends))
    return None


def collect(running, folder, ends, patience_s=200):
    """Wait for the end of all; the one at fault is killed when it is the last of its scenario."""
    began_s = time.monotonic()
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            ends["{}-{}".format(*running.pop(pid))] = os.waitstatus_to_exitcode(status)
            continue
        time.sleep(0.02)
        for pid, (name, rank) in running.items():
            is_last = [other for other, _ in running.values()].count(name) == 1
            is_at_fault = (folder / f"{name}.fault").exists() and rank == (0 if name.startswith("store_") else 1)
            if (is_last and is_at_fault and name not in ENDS_BY_ITSELF) or time.monotonic() - began_s > patience_s:
                os.kill(pid, signal.SIGKILL)


def suspend_all(pids, folder):
    if not pids:
        return
    until(lambda: all((folder / f"suspended-{rank}.ready").exists() for rank in range(len(pids))))
    time.sleep(1)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(6)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.5)


class Ends:
    """How each process of the nursery ended."""

    def __init__(self, folder, *waves):
        names = [[scenario.__name__ for scenario in wave] for wave in waves]
        arguments = [str(folder), json.dumps(names)]
        environment = {key: value for key, value in os.environ.items() if key != "TRIMTAB_PATIENCE"}
        done = subprocess.run(
            [sys.executable, __file__, *arguments],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=500,
        )
        assert done.returncode == 0, done.stderr
        self.folder = folder
        self.ends = json.loads((folder / "ends.json").read_text())

    def code(self, name, rank):
        return self.ends[f"{name}-{rank}"]

    def text(self, name, rank, suffix="err"):
        return (self.folder / f"{name}-{rank}.{suffix}").read_text()


@pytest.fixture(scope="module")
def quick_ends(tmp_path_factory):
    """Two ways to be lost and one to exit."""
    return Ends(tmp_path_factory.mktemp("nursery"), QUICKLY_SEEN)


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    return Ends(tmp_path_factory.mktemp("nursery"), FAULTS, FALSE_ALARMS)


def test_a_lost_rank_is_named(quick_ends):
    text = quick_ends.text("killed", 0)
    assert quick_ends.code("killed", 0) == quick_ends.code("killed", 2) == 1, text
    assert re.search(
        r"PeerError: rank 1 \(host \S+, pid \d+\) is gone: .*last progress: step 3: forward", text, re.DOTALL
    )
    failed = "trimtab: rank 0 stops waiting in gather: rank 1 failed: ValueError: no such label"
    assert failed in quick_ends.text("raises_without_error", 0)
    assert quick_ends.code("raises_without_error", 0) == 1
    assert [quick_ends.code("exits", rank) for rank in (0, 1)] == [0, 0]
    assert quick_ends.text("exits", 0, "out").startswith("rank 1 has exited; rank 0 waits for it in again")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("killed_without_error", (0,), r"rank 1 \(host \S+, pid \d+\) is gone: .*last progress: step 3: forward"),
        ("stopped", (0, 2), r"rank \d stops waiting in gather: rank 1 .*has not reported for .*step 3: .*SIGSTOP"),
        ("ends", (0,), r"rank 1 has exited"),
        ("store_stopped", (1,), r"rank 0 \(host \S+, pid \d+\) has not reported .*stopped"),
        ("store_killed", (1,), r"rank 0 \(host \S+, pid \d+\) is gone: .*last progress: step 3: forward"),
    ],
)
def test_the_other_ranks_end_with_a_message(ends, name, ranks, message):
    for rank in ranks:
        text = ends.text(name, rank)
        assert ends.code(name, rank) == 1, text
        assert re.search(message, text, re.DOTALL), text
    if name.startswith("store_"):  # rank 2 exits in order although a thread of it is stuck in the store
        assert ends.code(name, 2) == 0, ends.text(name, 2)
        assert "trimtab:" not in ends.text(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in FALSE_ALARMS])
def test_no_false_alarm(ends, name):
    for rank in range(2):
        assert ends.code(name, rank) == 0, ends.text(name, rank)
        assert "trimtab:" not in ends.text(name, rank)


if __name__ == "__main__":
    nursery(Path(sys.argv[1]), json.loads(sys.argv[2]))
