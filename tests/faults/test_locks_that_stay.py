"""Folders in which nothing can be removed or written any more: one message, and never a traceback."""

import contextlib
import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

import trimtab
from small_disk import mounted
from tiny_runs import reviews, write_csv
from trimtab.errors import CheckpointError, RecipeError
from trimtab.runs.lock import LOCK, RunLock
from trimtab.runs.run_folder import RunFolder, check_free, clear_folder


@contextlib.contextmanager
def attribute(letter, path):
    """Give a file or a folder an attribute of the file system: i for immutable, a for append-only."""
    if shutil.which("chattr") is None or subprocess.run(["chattr", f"+{letter}", path], capture_output=True).returncode:
        pytest.skip("this user, or this file system, has no attributes of files")
    try:
        yield
    finally:
        subprocess.run(["chattr", f"-{letter}", path], check=True)


@pytest.fixture
def said(caplog):
    caplog.set_level("INFO", logger="trimtab")
    return lambda: [message for message in caplog.messages if LOCK in message]


@pytest.mark.parametrize("frozen", [LOCK, "."])
def test_a_lock_that_cannot_be_removed_at_the_end(tmp_path, said, frozen):
    """The run is done, and is reported as that; the lock of a process that has ended is no lock."""
    folder = RunFolder(tmp_path / "run")
    folder.start({}, num_steps=3)
    folder.update(step=3)
    with attribute("i", folder.path / frozen):
        folder.finish("finished")
        (told,) = said()
        assert f"{folder.path / LOCK} cannot be removed: Operation not permitted" in told
        with pytest.raises(RecipeError, match="contains a"):
            check_free(folder.path)
    RunFolder(folder.path, resumes=True).finish("finished")


def test_a_lock_of_a_dead_process_that_cannot_be_replaced(tmp_path):
    """It is one message each time; what the first attempt has left does not hold up the second."""
    folder = RunFolder(tmp_path / "run")
    folder.finish("stopped")
    dead = {"pid": 2**22 + 1, "host": socket.gethostname(), "began": "1", "token": "x"}
    lock = folder.path / LOCK
    lock.write_text(json.dumps(dead))
    with attribute("i", lock):
        for _ in range(2):
            with pytest.raises(CheckpointError, match="Operation not permitted"):
                RunFolder(folder.path, resumes=True)
            assert not list(folder.path.glob(f".{LOCK}.*"))


def test_a_folder_in_which_nothing_can_be_renamed(tmp_path, said):
    (tmp_path / "run").mkdir()
    with attribute("a", tmp_path / "run"):
        with pytest.raises(CheckpointError, match=r"run\.json cannot be written: Operation not permitted"):
            RunFolder(tmp_path / "run")
        assert len(said()) == 1
    check_free(tmp_path / "run")


def test_a_state_that_cannot_be_removed_is_not_left_to_the_next_run(tmp_path):
    """`fresh` in a folder that keeps its old states would let the new run resume from them."""
    state = tmp_path / "run" / "checkpoints" / "step-5"
    state.mkdir(parents=True)
    with attribute("i", state), pytest.raises(RecipeError, match=r"step-5.* cannot be removed"):
        clear_folder(tmp_path / "run")


def test_a_disk_that_is_read_only(tmp_path, said):
    with mounted(tmp_path / "disk", "1m") as disk:
        folder = RunFolder(disk / "run")
        lock = RunLock(disk)
        lock.acquire()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        folder.finish("finished")
        lock.release()
        assert [line for line in said() if "cannot be removed: Read-only file system" in line] == said()
        assert len(said()) == 2
        with pytest.raises(CheckpointError, match="Read-only file system"):
            RunLock(disk / "run").acquire()


class Freeze:
    """A callback that makes the lock of the run immutable."""

    def __init__(self, attributes):
        self._attributes = attributes

    def on_step(self, state):
        if state.step == 3:
            self._attributes.enter_context(attribute("i", Path("run") / LOCK))


def test_a_run_whose_lock_stays(own_folder, tiny, said):
    """Trained, reported, and trained for longer afterwards."""
    write_csv(own_folder / "reviews.csv", reviews(40))
    recipe = trimtab.Recipe(
        model=tiny.folder("bert"), data={"train": "reviews.csv"}, train={"epochs": 1, "batch_size": 9}, out="run"
    )
    with contextlib.ExitStack() as attributes:
        result = trimtab.fit(recipe, callbacks=[Freeze(attributes)], progress="quiet", device="cpu")
        assert result.fit.step == 4
        assert len(said()) == 1
        with pytest.raises(CheckpointError, match=f"{LOCK} cannot be created: Operation not permitted"):
            trimtab.resume("run", sets=["train.epochs=2"], progress="quiet", device="cpu")
    assert trimtab.resume("run", sets=["train.epochs=2"], progress="quiet", device="cpu").fit.step == 8
    assert yaml.safe_load(Path("run/recipe.yaml").read_text())["train"]["epochs"] == 2
