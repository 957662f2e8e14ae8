"""The launcher is killed and cannot end its processes: the kernel ends them, whatever they are doing."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from trimtab.checkpoint.process_identity import is_running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends processes with their parent")

WAITS = """
import os, time
with open(os.environ["RANK"] + ".part", "w") as file:
    file.write(str(os.getpid()))
os.rename(os.environ["RANK"] + ".part", os.environ["RANK"] + ".pid")
time.sleep(600)
"""
# Rank 0 waits in the rendezvous for rank 1, which never joins.
NOT_CONNECTED = f"""
import os
if os.environ["RANK"] == "0":
    from trimtab import Engine
    with open("0.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename("0.part", "0.pid")
    Engine(cpu=True)
{WAITS}
"""
NOTEBOOK = """
import trimtab

def waits():
    import os, time
    for name, pid in ((os.environ["RANK"], os.getpid()), ("launcher", os.getppid())):
        with open(f"{name}.{os.getpid()}", "w") as file:
            file.write(str(pid))
        os.rename(f"{name}.{os.getpid()}", f"{name}.pid")
    time.sleep(600)

trimtab.launch(waits, processes=2, cpu=True)
"""


def kill_and_wait(child, names):
    """Kill a process once all of these have written their pids, and wait until each of them has ended."""
    files = [Path(f"{name}.pid") for name in names]
    pids = []
    try:
        child.wait_until(lambda: all(file.exists() for file in files), timeout=240)
        pids = [int(file.read_text()) for file in files]
        assert all(is_running(pid) for pid in pids)
        child.kill(signal.SIGKILL)
        assert child.wait() == -signal.SIGKILL
        end = time.monotonic() + 60
        while left := [pid for pid in pids if is_running(pid)]:
            assert time.monotonic() < end, f"{len(left)} of {len(pids)} processes are left"
            time.sleep(0.02)
    finally:
        child.kill()
        for pid in pids:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)


def test_processes_end_with_their_launcher(own_folder, fork_server):
    Path("waits.py").write_text(WAITS)
    kill_and_wait(fork_server.start_command("launch", "--quiet", "--cpu", "--processes", "2", "waits.py"), "01")


@pytest.mark.slow
def test_processes_in_the_rendezvous_end_too(own_folder, fork_server):
    Path("alone.py").write_text(NOT_CONNECTED)
    kill_and_wait(fork_server.start_command("launch", "--quiet", "--cpu", "--processes", "2", "alone.py"), "01")


@pytest.mark.slow
def test_processes_of_a_notebook_end_with_it(own_folder, fork_server):
    Path("notebook.py").write_text(NOTEBOOK)
    kill_and_wait(fork_server.start_script(own_folder / "notebook.py"), ["launcher", "0", "1"])
