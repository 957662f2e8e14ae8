"""The end of a process group: it waits for threads of gloo at work, and nothing hangs in a destructor."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from group_ends import ENDS, ERRORS
from launching import start_together

from trimtab.distributed import gloo_threads


@pytest.fixture
def threads(tmp_path, monkeypatch):
    """Describes threads as Linux does in /proc; gives what changes at each look, and the clock."""
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    clock, script = [0.0], []

    def describe(name, state, switches, thread="4711"):
        (tmp_path / thread).mkdir(exist_ok=True)
        text = f"Name:\t{name}\nState:\t{state}\nvoluntary_ctxt_switches:\t{switches}\n"
        (tmp_path / thread / "status").write_text(text)

    def sleep(seconds):
        clock[0] += seconds
        if script:
            describe(*script.pop(0))

    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "sleep", sleep)
    return describe, script, clock


def test_threads_of_gloo_are_waited_for_until_they_rest(threads):
    describe, script, clock = threads
    describe("pt_gloo_runloop", "R (running)", 1)
    # it is on a processor; asleep, but it has woken up since (for the interpreter's lock); at rest
    script += [("pt_gloo_runloop", "R (running)", 1)] * 2
    script += [("pt_gloo_runloop", "S (sleeping)", number) for number in (2, 5, 9, 9)]
    gloo_threads.wait_for_idle_gloo()
    assert not script
    describe("pt_gloo_runloop", "R (running)", 9)
    begun = clock[0]
    gloo_threads.wait_for_idle_gloo(timeout_s=1.0)
    assert 1.0 <= clock[0] - begun < 1.1


def test_no_other_thread_is_waited_for(threads, tmp_path):
    describe, _, clock = threads
    describe("python", "R (running)", 1)
    (tmp_path / "4712").mkdir()  # has ended: it has no status
    gloo_threads.wait_for_idle_gloo()
    assert clock == [0.0]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have no names in /proc on this system")
def test_torch_names_its_threads_so():
    code = (
        "import torch\n"
        "import torch.distributed as dist\n"
        "from pathlib import Path\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(2))\n"
        "print(*[(thread / 'comm').read_text() for thread in Path('/proc/self/task').glob('*')])\n"
        "dist.destroy_process_group()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pt_gloo" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_no_end_of_a_loop_hangs(fork_server, tmp_path, end):
    """Without the wait for gloo's threads, one in about a hundred hung after the group was destroyed."""
    children = []
    for number in range(20):
        of_loop = {"end": end, "drop_in": number % 2 == 0}
        children.append(fork_server.start("group_ends:main", store=str(tmp_path / str(number)), **of_loop))
        if number % 4 == 0:
            children += start_together(fork_server, "group_ends:main", 2, **of_loop)
        if number % 4 == 3:  # some at once: a busy machine makes it likelier
            for child in children:
                assert child.wait(100) == ENDS[end], child.said
                assert "Exception ignored" not in child.said
                assert ERRORS.get(end, "") in child.said
            children.clear()
