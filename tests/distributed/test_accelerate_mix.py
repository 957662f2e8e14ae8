"""Accelerate's functions next to an Engine of several CPU processes: the real ones where Accelerate is installed."""

import importlib
import logging
import os
import sys

import accelerate_mix
import pytest
from launching import run_by_torchrun, run_together

from trimtab.distributed import accelerate_state
from trimtab.distributed.environment import RankInfo

PLACE = RankInfo(1, 2, 1, 2, "localhost", 29000, "environment")
STATE = """
import os

class PartialState:
    _shared_state = {}

    def __init__(self, cpu=False):
        self.__dict__ = self._shared_state
        if not self._shared_state:
            self.num_processes = int(os.environ["WORLD_SIZE"]) if cpu else 1
            self.process_index = int(os.environ["RANK"]) if cpu else 0
            os.environ["MASTER_PORT"] = "29500"
"""


@pytest.mark.slow
def test_accelerate_sees_all_processes(fork_server, tmp_path):
    pytest.importorskip("accelerate")
    folder = tmp_path / "early"
    folder.mkdir()
    run_together(fork_server, accelerate_mix, folder, 2)
    assert {path.name for path in folder.glob("done-*")} == {"done-0", "done-1"}


@pytest.mark.slow
def test_accelerate_sees_all_processes_when_it_is_imported_late(tmp_path):
    pytest.importorskip("accelerate")
    run_by_torchrun(accelerate_mix, tmp_path, 2)
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A package in the place of Accelerate that finds its processes as Accelerate does, and a process group of two."""
    package = tmp_path / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(STATE)
    for name in [name for name in sys.modules if name.split(".")[0] == "accelerate"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(accelerate_state.dist, "get_rank", lambda: 1)
    monkeypatch.setattr(accelerate_state.dist, "get_world_size", lambda: 2)
    yield lambda: importlib.import_module("accelerate.state")
    for name in ("accelerate", "accelerate.state"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("is_early", [True, False])
def test_the_state_is_made_for_the_connected_processes(stand_in, is_early):
    environment = dict(os.environ)
    if is_early:
        stand_in()
    num_finders = len(sys.meta_path)
    accelerate_state.make_partial_state(PLACE)
    accelerate_state.make_partial_state(PLACE)
    state = stand_in().PartialState()
    assert (state.num_processes, state.process_index) == (2, 1)
    assert len(sys.meta_path) == num_finders
    assert dict(os.environ) == environment


def test_a_state_that_knows_one_process_is_told_of(stand_in, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("trimtab"), "propagate", True)
    with monkeypatch.context() as patch:
        patch.setenv("MASTER_PORT", "1")
        stand_in().PartialState()
    accelerate_state.make_partial_state(PLACE)
    assert "Create the Engine first" in caplog.text
