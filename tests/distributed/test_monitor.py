"""Monitors in one process, then real processes that are lost in each way."""

import contextlib
import os
import re
import signal
import threading
import time

import monitor_scenarios
import pytest
import torch.distributed as dist
from monitor_scenarios import FALSE_ALARMS, FAULTS, QUICKLY_SEEN, TIMEOUTS, until

from trimtab.distributed.health import monitor as monitor_module
from trimtab.distributed.health.monitor import Monitor, PeerMonitor
from trimtab.distributed.health.peers import Timeouts
from trimtab.distributed.health.rules import DEADLOCK
from trimtab.errors import PeerError, RecipeError

# ---------------------------------------------------------------------- monitors in one process


@pytest.fixture
def monitors(monkeypatch):
    """Two ranks in this process, which must not end it."""
    monkeypatch.setattr(PeerMonitor, "_abort", lambda monitor, verb, fault: None)
    store = dist.HashStore()
    pair = [PeerMonitor(dist.PrefixStore("m", store), rank, 2, TIMEOUTS) for rank in range(2)]
    for monitor in pair:
        monitor.start()
        monitor.start()  # has been done
    yield pair
    for monitor in pair:
        monitor.stop()
        monitor.stop()
    assert not [thread for thread in threading.enumerate() if thread.name in ("trimtab-monitor", "trimtab-exchange")]


def both(first, second):
    """Run two functions as main threads; return what each raised."""
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


def test_meeting_with_a_rank_that_failed_exited_or_waits_elsewhere(monitors):
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


@pytest.mark.slow
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
    assert "rank 0 saw: RuntimeError: Connection closed by peer" in str(error)


def test_a_forked_child_does_not_report_for_its_parent(monitors):
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
        return PeerMonitor(dist.HashStore(), 0, 2, Timeouts())._peers.timeouts

    assert max(timeouts().lost_s, timeouts().idle_s) + 5 * timeouts().interval_s <= 30, "a fault is named within 30 s"
    for text, expected in (("1h", (10, 3600, 3600)), ("5", (10, 18, 5))):
        monkeypatch.setenv("TRIMTAB_PATIENCE", text)
        assert timeouts() == expected
    monkeypatch.setenv("TRIMTAB_PATIENCE", "forever")
    with pytest.raises(RecipeError, match="TRIMTAB_PATIENCE='forever' is not a duration"):
        timeouts()


def test_the_monitor_of_one_process_does_nothing():
    alone = Monitor()
    alone.did("x")
    with alone.waiting("x"), alone.long("y"):
        alone.meet("x")
    assert str(alone.explain(ValueError("x"))) == "ValueError: x"


def test_the_main_thread_only_takes_notes():
    """A step takes no lock, calls no store and wakes no thread, each of which would cost time."""
    monitor = PeerMonitor(dist.HashStore(), 0, 2, Timeouts())
    monitor._pid = os.getpid()  # as after the start
    monitor._peers = monitor._exchange = monitor._store = None
    monitor.did("step 12: forward")
    with monitor.waiting("gather"):
        assert monitor._state.operation == "gather"


# ---------------------------------------------------------------------- real processes


@pytest.fixture(scope="module")
def play(fork_server, tmp_path_factory):
    """Runs scenarios in parallel; returns exit code and output by name and rank."""

    def play(scenarios):
        folder = tmp_path_factory.mktemp("scenarios")
        running = {}
        for name in [scenario.__name__ for scenario in scenarios]:
            for rank in range(monitor_scenarios.NUM_PROCESSES.get(name, 2)):
                arguments = {"name": name, "rank": rank, "folder": str(folder)}
                running[name, rank] = fork_server.start("monitor_scenarios:main", **arguments)
        suspend([child for (name, _), child in running.items() if name == "suspended"], folder)
        for key in running.keys() - monitor_scenarios.NEVER_ENDS:
            running[key].wait(200)
        for child in running.values():
            child.kill()
        return {key: (child.wait(), child.said) for key, child in running.items()}

    return play


def suspend(children, folder):
    """Stop all for longer than any timeout, and wake one after the other."""
    until(lambda: len(list(folder.glob("suspended-*.ready"))) == len(children))
    time.sleep(1)
    for child in children:
        child.kill(signal.SIGSTOP)
    time.sleep(6 if children else 0)
    for child in children:
        child.kill(signal.SIGCONT)
        time.sleep(0.5)


@pytest.fixture(scope="module")
def quick_ends(play):
    return play(QUICKLY_SEEN)


@pytest.fixture(scope="module")
def ends(play):
    return play(FAULTS) | play(FALSE_ALARMS)


def test_a_lost_rank_is_named(quick_ends):
    code, text = quick_ends["killed", 0]
    assert code == quick_ends["killed", 2][0] == 1, text
    assert re.search(
        r"PeerError: rank 1 \(host \S+, pid \d+\) is gone: .*last progress: step 3: forward", text, re.DOTALL
    )
    code, text = quick_ends["raises_without_error", 0]
    assert "trimtab: rank 0 stops waiting in gather: rank 1 failed: ValueError: no such label" in text
    assert code == 1
    assert [quick_ends["exits", rank][0] for rank in (0, 1)] == [0, 0]
    assert quick_ends["exits", 0][1].startswith("rank 1 has exited; rank 0 waits for it in again")


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
        code, text = ends[name, rank]
        assert code == 1, text
        assert re.search(message, text, re.DOTALL), text
    if name.startswith("store_"):  # rank 2 exits in order although a thread of it is stuck in the store
        assert_no_alarm(ends[name, 2])


@pytest.mark.slow
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in FALSE_ALARMS])
def test_no_false_alarm(ends, name):
    for rank in range(2):
        assert_no_alarm(ends[name, rank])


def assert_no_alarm(end):
    code, text = end
    assert code == 0, text
    assert "trimtab:" not in text
