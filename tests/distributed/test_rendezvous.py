"""The exit of a rank: it waits for threads of gloo that are running, and for no others."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from trimtab.distributed import rendezvous
from trimtab.distributed.rendezvous import _is_running_gloo


def thread(folder, name, state):
    """A thread as Linux describes it in /proc."""
    folder.mkdir()
    (folder / "stat").write_text(f"4711 ({name}) {state} 1 4711 4711 0 -1 4194304 0 0\n")
    return folder


@pytest.mark.parametrize(
    ("name", "state", "is_running"),
    [
        ("pt_gloo_runloop", "R", True),
        ("pt_gloo_runloop", "D", True),
        ("pt_gloo_runloop", "S", False),
        ("pt_gloo_runloop", "Z", False),
        ("python", "R", False),
        ("pt_gloo_) S (x", "R", True),  # names may contain anything
        ("R (pt_gloo", "R", False),
    ],
)
def test_only_threads_of_gloo_that_run_are_waited_for(tmp_path, name, state, is_running):
    assert _is_running_gloo(thread(tmp_path / "4711", name, state)) is is_running


def test_a_thread_that_has_ended_is_not_running(tmp_path):
    assert not _is_running_gloo(tmp_path / "gone")


def test_waiting_ends_when_the_thread_sleeps_or_the_time_is_over(monkeypatch):
    asked = []

    def is_running(thread):
        asked.append(thread)
        return len(asked) < 3

    now = [0.0]
    monkeypatch.setattr(rendezvous, "Path", lambda place: Threads(place))
    monkeypatch.setattr(rendezvous, "_is_running_gloo", is_running)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    rendezvous._wait_for_idle_gloo()
    assert len(asked) == 3
    monkeypatch.setattr(rendezvous, "_is_running_gloo", lambda thread: True)
    started = now[0]
    rendezvous._wait_for_idle_gloo(timeout_s=1.0)
    assert 1.0 <= now[0] - started < 1.1


class Threads:
    """A process with one thread."""

    def __init__(self, place):
        assert place == "/proc/self/task"

    def glob(self, pattern):
        return [Path("thread")]


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
