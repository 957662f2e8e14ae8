"""A process is identified by its id and start time, so a reused id is recognized."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from trimtab.checkpoint.process_identity import Process, is_running, this_process, was_running_at


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def test_this_process_runs():
    own = this_process()
    assert own.pid == os.getpid()
    assert own.is_here
    assert own.is_running()
    assert own == this_process()
    assert own.began or sys.platform not in ("linux", "darwin")


def test_another_process_runs_until_it_is_killed(sleeper):
    assert is_running(sleeper.pid)
    sleeper.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert not is_running(sleeper.pid), "a zombie was taken for alive"
    sleeper.wait()
    assert not is_running(sleeper.pid)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="only Linux tells in this way when a process began")
def test_a_number_that_was_given_again():
    own = this_process()
    assert not replace(own, began=own.began[:-1] + ("1" if own.began[-1] == "0" else "0")).is_running()
    assert not replace(own, began="of another boot 17").is_running()
    assert replace(own, began="").is_running(), "in doubt it runs"
    assert was_running_at(own.pid, time.time())
    assert not was_running_at(own.pid, time.time() - 1e7)


def test_a_name_with_spaces_and_brackets(tmp_path):
    """The name is in the middle of /proc/PID/stat."""
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    name = tmp_path / "a ) Z 1 ("
    name.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(name), "30"])
    try:
        time.sleep(0.05)
        assert is_running(process.pid)
        assert was_running_at(process.pid, time.time())
        assert not was_running_at(process.pid, time.time() - 1e7)
    finally:
        process.kill()
        process.wait()


def test_other_hosts_and_no_processes():
    assert not Process(1, "elsewhere", "").is_here
    for pid in (0, -1, 2**22 + 1):
        assert not is_running(pid)
        assert not was_running_at(pid, time.time())
