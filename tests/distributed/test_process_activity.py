"""State and activity of processes, read from /proc, and the stack of a thread."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from monitor_scenarios import until

from trimtab.distributed.health import process_activity
from trimtab.distributed.health.process_activity import Activity, describe_stack, find_pid_namespace, find_process


@pytest.mark.skipif(find_process(os.getpid()) is None, reason="no /proc here")
def test_process_states():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert find_pid_namespace()
        until(lambda: find_process(child.pid).state == "S")
        started = find_process(child.pid).started
        assert started >= find_process(os.getpid()).started
        child.send_signal(signal.SIGSTOP)
        until(lambda: find_process(child.pid).state == "T")
        child.kill()
        until(lambda: find_process(child.pid).state == "Z")  # not waited for yet
    finally:
        child.kill()
        child.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert find_process(child.pid) is None


PROGRAMS = {
    "sleeps": "time.sleep(60)",
    "polls": "while True: time.sleep(0.05)",
    "computes": "while True: sum(range(100_000)); time.sleep(0.01)",
    "waits for a child that computes": "subprocess.run([sys.executable, '-c', 'while True: pass'])",
    "reads": "file = open('/dev/zero', 'rb', 0)\nwhile True: file.read(20_000); time.sleep(0.1)",
}
IDLE = {"sleeps", "polls"}


@pytest.mark.skipif(find_process(os.getpid()) is None, reason="no /proc here")
def test_activity():
    children = {}
    try:
        for name, code in PROGRAMS.items():
            command = [sys.executable, "-c", f"import subprocess, sys, time\nprint('up', flush=True)\n{code}"]
            children[name] = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
        for child in children.values():
            child.stdout.readline()
        activities = {name: Activity(child.pid) for name, child in children.items()}
        looked_s = time.monotonic()

        def are_told_apart():
            nonlocal looked_s
            time.sleep(0.3)
            before_s, looked_s = looked_s, time.monotonic()
            for activity in activities.values():
                activity.pass_time(looked_s - before_s)
            idle = {name for name, activity in activities.items() if activity.idle_s > 1}
            active = {name for name, activity in activities.items() if activity.idle_s == 0}
            return idle == IDLE and active == PROGRAMS.keys() - IDLE

        until(are_told_apart)  # on a busy machine a process may not run for a while
    finally:
        for child in children.values():
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()


def test_without_proc_a_process_is_never_idle(monkeypatch):
    monkeypatch.setattr(process_activity, "find_process", lambda pid: None)
    activity = Activity(os.getpid())
    for _ in range(30):
        activity.pass_time(1.0)
    assert activity.idle_s == 0.0


def test_describe_stack():
    found = []
    main = threading.get_ident()
    thread = threading.Thread(target=lambda: found.append(describe_stack(main)))
    thread.start()
    thread.join()
    stack, in_debugger = found[0]
    assert "test_process_activity.py:" in stack
    assert "in test_describe_stack" in stack
    assert not in_debugger
