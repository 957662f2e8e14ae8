"""One process holds a run's folder; a dead one holds nothing; of many that want it exactly one gets it."""

import json
import os
import socket
import subprocess
import sys
import time
import zlib

import pytest

from trimtab.checkpoint.process_identity import this_process
from trimtab.errors import CheckpointError
from trimtab.runs import lock as lock_module
from trimtab.runs.lock import LOCK, RunLock, lock_holder

NUM_ROUNDS = 100
HOLD = """
import sys
from trimtab.runs.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.readline()
"""
# every line starts a round; who gets the lock keeps it until the round is over
RACE = """
import sys
from trimtab.runs import lock
from trimtab.errors import CheckpointError
if sys.argv[2] == "no flock":
    def refuse(*_): raise OSError(38, "Function not implemented")
    lock.fcntl.flock = refuse
for _ in sys.stdin:
    try:
        lock.RunLock(sys.argv[1]).acquire()
        print("held", flush=True)
    except CheckpointError as error:
        print(error.problem, flush=True)
"""


def python(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def holder(tmp_path):
    process = python(HOLD, tmp_path)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def forge(folder, **changes):
    """A lock of this process, but for the changes."""
    own = this_process()
    said = {"pid": own.pid, "host": own.host, "began": own.began, "token": "of another", "since": 0} | changes
    (folder / LOCK).write_text(json.dumps(said))


def test_held_while_it_runs_and_free_after(tmp_path):
    assert lock_holder(tmp_path) is None
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
        holder = lock_holder(tmp_path)
        assert (holder.process, holder.state) == (this_process(), "running")
        with pytest.raises(CheckpointError, match=rf"in use by process {os.getpid()} on this machine"):
            RunLock(tmp_path).acquire()
        assert lock.is_held()
    assert not list(tmp_path.iterdir())
    RunLock(tmp_path).acquire()
    (tmp_path / LOCK).unlink()


def test_another_process_holds_it(tmp_path, holder):
    for take_over in (False, True):
        with pytest.raises(CheckpointError, match=rf"process {holder.pid} on this machine\n.*kill {holder.pid}"):
            RunLock(tmp_path, take_over=take_over, patience_s=0).acquire()
    assert lock_holder(tmp_path).state == "running"
    holder.communicate("\n")
    with RunLock(tmp_path):
        pass


def test_killed_it_holds_nothing(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert lock_holder(tmp_path).state == "dead"
    with RunLock(tmp_path) as lock:
        assert lock.is_held()
        assert {path.name for path in tmp_path.iterdir()} == {LOCK}


def test_a_number_that_was_given_again_holds_nothing(tmp_path):
    forge(tmp_path, pid=os.getppid(), began="of another boot 5")
    assert lock_holder(tmp_path).state == "dead"
    with RunLock(tmp_path):
        pass


def test_an_earlier_run_of_this_process_holds_nothing(tmp_path):
    """A notebook whose run ended by an uncaught error."""
    forge(tmp_path)
    with RunLock(tmp_path) as lock:
        assert lock.is_held()


@pytest.fixture
def quick_watch(monkeypatch):
    monkeypatch.setattr(lock_module, "_WATCHED_S", 0.1)


def test_on_another_machine_it_is_refused_unless_told(tmp_path, quick_watch):
    forge(tmp_path, host="node7", pid=4321)
    os.utime(tmp_path / LOCK, (0, time.time() - 7200))
    assert lock_holder(tmp_path).state == "elsewhere"
    words = rf"process 4321 on node7, whose last heartbeat is 2 h old\n.*delete {tmp_path / LOCK}"
    for patience_s in (None, 1e4):
        with pytest.raises(CheckpointError, match=words):
            RunLock(tmp_path, patience_s=patience_s).acquire()
    with RunLock(tmp_path, take_over=True):
        assert lock_holder(tmp_path).process.host == socket.gethostname()
    forge(tmp_path, host="node7", pid=4321)
    os.utime(tmp_path / LOCK, (0, time.time() - 7200))
    with RunLock(tmp_path, patience_s=3600):
        pass


@pytest.mark.parametrize("hours", [-3, 3])
def test_a_clock_that_is_set_by_hours(tmp_path, monkeypatch, quick_watch, holder, hours):
    """A running process keeps its lock, here and on another machine; the lock of a dead one is replaced."""
    true_time = time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + hours * 3600)
    with pytest.raises(CheckpointError, match=f"in use by process {holder.pid} on this machine"):
        RunLock(tmp_path, patience_s=1800).acquire()
    assert lock_holder(tmp_path).state == "running"
    holder.kill()
    holder.wait()
    raw = (tmp_path / LOCK).read_bytes()
    (tmp_path / f".{LOCK}.{zlib.crc32(raw):08x}").touch()  # it was killed while it replaced the lock
    with RunLock(tmp_path, patience_s=1800):
        assert {path.name for path in tmp_path.iterdir()} == {LOCK}
    forge(tmp_path, host="node7", pid=4321)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: os.utime(tmp_path / LOCK, (0, 10**9)))
        with pytest.raises(CheckpointError, match="in use by process 4321 on node7"):
            RunLock(tmp_path, patience_s=1800).acquire()
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", lambda _: (tmp_path / LOCK).unlink(missing_ok=True))  # it ends meanwhile
        RunLock(tmp_path, patience_s=1800).acquire()
    forge(tmp_path, host="node7", pid=4321)
    with RunLock(tmp_path, patience_s=1800) as lock:
        assert lock.is_held()


def test_a_heartbeat(tmp_path):
    with RunLock(tmp_path) as lock:
        os.utime(tmp_path / LOCK, (0, time.time() - 7200))
        assert lock_holder(tmp_path).silent_s > 7000
        lock.beat()
        assert lock_holder(tmp_path).silent_s < 60
        (tmp_path / LOCK).unlink()
        lock.beat()  # harmless
        assert not lock.is_held()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "{}"])
def test_a_lock_that_names_nobody_is_waited_for_and_then_taken(tmp_path, monkeypatch, text):
    """Its writer may be about to write; one that was killed in between never does."""
    monkeypatch.setattr(lock_module, "_HALF_WRITTEN_S", 0.12)
    (tmp_path / LOCK).write_text(text)
    began = time.monotonic()
    with RunLock(tmp_path):
        assert time.monotonic() - began > 0.1


def test_a_lock_that_was_taken_away_is_left_to_the_taker(tmp_path):
    lock = RunLock(tmp_path)
    lock.acquire()
    forge(tmp_path, host="node7")
    lock.release()
    assert lock_holder(tmp_path).process.host == "node7"


def test_a_lock_that_was_lost_does_not_release_the_next(tmp_path):
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.acquire()
    (tmp_path / LOCK).unlink()
    second.acquire()
    assert (first.is_held(), second.is_held()) == (False, True)
    first.release()
    assert second.is_held()
    second.release()
    assert not (tmp_path / LOCK).exists()


def test_a_forked_child_does_not_release(tmp_path):
    code = (
        "import os, sys; from trimtab.runs.lock import RunLock\n"
        "lock = RunLock(sys.argv[1]); lock.acquire()\n"
        "if os.fork() == 0: lock.release(); os._exit(0)\n"
        "os.wait(); print(lock.is_held())"
    )
    assert python(code, tmp_path).communicate()[0] == "True\n"


def test_a_folder_that_may_not_be_written(as_somebody):
    place, unprivileged = as_somebody
    place.chmod(0o555)
    with unprivileged(), pytest.raises(CheckpointError, match=r"run\.lock cannot be created: Permission denied"):
        RunLock(place).acquire()
    with pytest.raises(CheckpointError, match=r"cannot be created: No such file"):
        RunLock(place / "missing").acquire()


def test_a_full_disk_leaves_no_empty_lock(tmp_path, file_size_limit):
    with file_size_limit(0), pytest.raises(CheckpointError, match="File too large"):
        RunLock(tmp_path).acquire()
    assert not list(tmp_path.iterdir())


def test_killed_while_it_replaced_a_stale_lock(tmp_path):
    forge(tmp_path, pid=2**22 + 1)
    claim = tmp_path / f".{LOCK}.{zlib.crc32((tmp_path / LOCK).read_bytes()):08x}"
    claim.touch()
    os.utime(claim, (0, time.time() - 61))
    with RunLock(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {LOCK}


@pytest.mark.parametrize("flock", ["flock", "no flock"])
def test_of_many_at_once_exactly_one_gets_it(tmp_path, flock):
    """With and without flock on the file system; a free folder and a stale lock in turn."""
    racers = [python(RACE, tmp_path, flock) for _ in range(4)]
    try:
        for number in range(NUM_ROUNDS):
            (tmp_path / LOCK).unlink(missing_ok=True)
            if number % 2:
                forge(tmp_path, pid=2**22 + 1)
            for racer in racers:
                racer.stdin.write("\n")
                racer.stdin.flush()
            said = [racer.stdout.readline().strip() for racer in racers]
            assert said.count("held") == 1, said
            winner = racers[said.index("held")].pid
            assert lock_holder(tmp_path).process.pid == winner
            refused = [words for words in said if words != "held"]
            assert all(f"in use by process {winner}" in words for words in refused), said
            assert {path.name for path in tmp_path.iterdir()} == {LOCK}
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
