"""The mirror is a complete copy, perhaps an older one; a failure never reaches the run, and a later sync repairs it."""

import json
import logging
import os
import shutil
import sys
import threading

import pytest
import torch

from trimtab.checkpoint import mirror as mirror_module
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.codec import encode
from trimtab.checkpoint.folder import atomic_folder
from trimtab.checkpoint.mirror import Mirror, restore
from trimtab.checkpoint.store import write_checkpoint
from trimtab.errors import CheckpointError


class RunOf:
    """A run's folder with a shelf, a best model and a file of numbers."""

    def __init__(self, folder):
        self.folder = folder
        self.shelf = CheckpointsFolder(folder / "checkpoints", keep=2)
        folder.mkdir(exist_ok=True, parents=True)

    def save(self, *steps, num_values=8):
        for step in steps:
            parts = {"a": encode({"x": torch.full((num_values,), float(step))})}
            write_checkpoint(self.shelf.place(step), parts, {"step": step})
            self.shelf.tidy()

    def export(self, text):
        with atomic_folder(self.folder / "best", marker="trimtab.json", what="model") as place:
            (place / "trimtab.json").write_text(text)
            (place / "nested").mkdir()
            (place / "nested" / "weights").write_text(text)


@pytest.fixture
def run(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return RunOf(tmp_path / "run")


def contents(folder):
    """Files and folders, but for what is hidden."""
    return {
        str(path.relative_to(folder)): path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
        if not any(part.startswith(".") for part in path.relative_to(folder).parts)
    }


def steps(folder):
    return [
        checkpoint.step for checkpoint in CheckpointsFolder(folder / "checkpoints").checkpoints() if checkpoint.is_valid
    ]


def said(caplog, words):
    return sum(words in message for message in caplog.messages)


def test_it_is_a_copy_and_follows_the_run(run, tmp_path):
    mirror = Mirror(run.folder, tmp_path / "far" / "mirror", files=("metrics.jsonl", "recipe.yaml"))
    run.save(1)
    assert mirror.sync() == ""
    assert contents(mirror.target) == contents(run.folder)
    run.export("first")
    (run.folder / "metrics.jsonl").write_text("1\n")
    run.save(2, 3)
    assert mirror.sync() == ""
    assert steps(mirror.target) == [2, 3]
    run.export("second")
    (run.folder / "metrics.jsonl").write_text("1\n2\n")
    (run.folder / "not asked for").touch()
    run.save(4)
    assert mirror.sync() == ""
    expected = contents(run.folder)
    del expected["not asked for"]
    assert contents(mirror.target) == expected
    assert not list(mirror.target.rglob(".*.writing*"))


def test_nothing_is_copied_twice(run, tmp_path, monkeypatch):
    run.save(1, 2)
    run.export("x")
    (run.folder / "f").write_text("x")
    copies, copyfile = [], shutil.copyfile
    monkeypatch.setattr(mirror_module.shutil, "copyfile", lambda a, b: copies.append(str(a)) or copyfile(a, b))
    for number in range(3):
        assert Mirror(run.folder, tmp_path / "m", files=("f",)).sync() == ""
        assert (len(copies) > 0) == (number == 0)
        copies.clear()
    shutil.rmtree(tmp_path / "m" / "best")
    (tmp_path / "m" / "f").unlink()
    (tmp_path / "m" / "checkpoints" / "step-2" / "state.json").unlink()
    assert Mirror(run.folder, tmp_path / "m", files=("f",)).sync() == ""
    assert contents(tmp_path / "m") == contents(run.folder), "what was lost there is brought back"


def test_a_rewritten_checkpoint_of_the_same_size_is_copied_again(run, tmp_path):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync()
    write_checkpoint(run.shelf.place(1), {"a": encode({"x": torch.full((8,), 7.0)})}, {"step": 1})
    assert mirror.sync() == ""
    assert contents(tmp_path / "m") == contents(run.folder)


def test_the_newest_comes_first_and_the_last_one_there_is_never_removed(run, tmp_path, monkeypatch):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync()
    run.save(2, 3, 4)  # the run has removed the only one that the mirror has
    order, there = [], []
    plain = mirror_module.copy_folder_atomically

    def watched(source, target, **options):
        there.append(steps(tmp_path / "m"))
        order.append(source.name)
        plain(source, target, **options)

    monkeypatch.setattr(mirror_module, "copy_folder_atomically", watched)
    mirror.sync()
    assert order == ["step-4", "step-3"]
    assert there == [[1], [1, 4]]
    assert steps(tmp_path / "m") == [3, 4]


def test_a_run_that_went_another_way_takes_the_mirror_with_it(run, tmp_path):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(10, 20)
    mirror.sync()
    run.shelf.drop_after(10)
    mirror.sync()
    assert steps(tmp_path / "m") == [10]


def test_a_run_that_lost_its_checkpoints_takes_none_with_it(run, tmp_path):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1, 2)
    mirror.sync()
    shutil.rmtree(run.folder / "checkpoints")
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1, 2]


def test_a_damaged_one_is_not_mirrored(run, tmp_path, caplog):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1, 2)
    path = run.shelf.place(2) / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1]
    assert said(caplog, f"step-2 is not mirrored: {path} is damaged") == 1
    assert not list((tmp_path / "m" / "checkpoints").glob(".*"))


# ---------------------------------------------------------------------- a place that fails


def test_a_full_drive_is_said_once_and_made_up_for(run, small_disk, leave_free, caplog):
    mirror = Mirror(run.folder, small_disk / "m")
    run.save(1)
    assert mirror.sync() == ""
    leave_free(6)
    for step in (2, 3, 4):
        run.save(step, num_values=20_000)
        assert "KiB and has " in mirror.sync()
        assert steps(small_disk / "m") == [1]
    assert said(caplog, "is not up to date") == 1
    (small_disk / "filler").unlink()
    assert mirror.sync() == ""
    assert said(caplog, "is up to date again") == 1
    assert steps(small_disk / "m") == [3, 4]
    assert contents(small_disk / "m") == contents(run.folder)


def test_the_full_drive_is_named_and_not_the_run(run, small_disk):
    (run.folder / "metrics.jsonl").write_bytes(bytes(2_000_000))
    problem = Mirror(run.folder, small_disk / "m", files=("metrics.jsonl",)).sync()
    assert problem == f"No space left on device ({small_disk / 'm' / '.metrics.jsonl.mirrored'})"


def test_a_drive_that_fills_up_while_it_is_written(run, tmp_path, file_size_limit):
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync()
    run.save(2, num_values=20_000)
    with file_size_limit(40_000):
        assert "File too large" in mirror.sync()
    assert steps(tmp_path / "m") == [1]
    assert not list((tmp_path / "m" / "checkpoints").glob(".*"))
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1, 2]


def test_gone_and_back(run, tmp_path, caplog):
    """As with a drive that is not mounted: the folder is moved away, and nothing grows in its place."""
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync()
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    run.save(2)
    for again in (mirror, mirror, Mirror(run.folder, tmp_path / "m")):  # also in a process that has just started
        assert "may be on a drive that is not mounted; mount the drive, or delete" in again.sync()
    assert not (tmp_path / "m").exists()
    assert said(caplog, "is not up to date: its content is missing") == 2, "once in each process"
    (tmp_path / "elsewhere").rename(tmp_path / "m")
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1, 2]
    shutil.rmtree(tmp_path / "m")
    (run.folder / ".mirror.json").unlink()  # what the message says
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1, 2]


@pytest.mark.parametrize("side", ["run", "mirror"])
@pytest.mark.parametrize("text", [None, "", '{"id": "34', "[]"])
def test_a_run_that_has_lost_what_pairs_it_with_its_mirror_is_recognized_by_its_id(run, tmp_path, side, text):
    """Also after `cp -r run/* new/`, which leaves hidden files behind."""
    (run.folder / "run.json").write_text(json.dumps({"id": "1234"}))
    run.save(1)
    assert Mirror(run.folder, tmp_path / "m", files=["run.json"]).sync() == ""
    damaged = (run.folder if side == "run" else tmp_path / "m") / ".mirror.json"
    damaged.unlink()
    if text is not None:
        damaged.write_text(text)
    run.save(2)
    assert Mirror(run.folder, tmp_path / "m", files=["run.json"]).sync() == ""
    assert steps(tmp_path / "m") == [1, 2]
    (run.folder / "run.json").write_text(json.dumps({"id": "5678"}))
    (run.folder / ".mirror.json").unlink()
    assert "is the mirror of another run" in Mirror(run.folder, tmp_path / "m", files=["run.json"]).sync()


def test_two_runs_do_not_share_a_mirror(run, tmp_path):
    other = RunOf(tmp_path / "other")
    run.save(1)
    other.save(5)
    assert Mirror(run.folder, tmp_path / "m").sync() == ""
    assert "is the mirror of another run" in Mirror(other.folder, tmp_path / "m").sync()
    assert steps(tmp_path / "m") == [1]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat").touch()
    assert "contains other files" in Mirror(other.folder, tmp_path / "photos").sync()
    assert contents(tmp_path / "photos").keys() == {"cat"}


def test_a_place_that_may_not_be_written(as_somebody, caplog):
    caplog.set_level(logging.INFO)
    place, unprivileged = as_somebody
    run = RunOf(place / "run")
    run.save(1)
    for path in (place / "run", place / "run" / "checkpoints", run.shelf.place(1)):
        path.chmod(0o777)
    (place / "locked").mkdir(mode=0o555)
    with unprivileged():
        assert "Permission denied" in Mirror(run.folder, place / "locked" / "m").sync()
    (place / "file").touch()
    assert Mirror(run.folder, place / "file").sync()


# ---------------------------------------------------------------------- what changes while it is read


def test_a_folder_that_is_replaced_while_it_is_read_is_no_mixture(run, tmp_path, monkeypatch):
    run.export("old")
    copyfile, copied = shutil.copyfile, []

    def slow(source, target):
        copied.append(source)
        copyfile(source, target)
        if len(copied) == 1:
            run.export("new")

    monkeypatch.setattr(mirror_module.shutil, "copyfile", slow)
    assert Mirror(run.folder, tmp_path / "m").sync() == ""
    assert len(copied) >= 4
    assert contents(tmp_path / "m" / "best") == contents(run.folder / "best")
    assert (tmp_path / "m" / "best" / "nested" / "weights").read_text() == "new"


def test_a_checkpoint_that_is_removed_while_it_is_read_is_no_failure(run, tmp_path, monkeypatch):
    run.save(1, 2)
    copyfile = shutil.copyfile

    def slow(source, target):
        shutil.rmtree(run.shelf.place(1), ignore_errors=True)
        copyfile(source, target)

    monkeypatch.setattr(mirror_module.shutil, "copyfile", slow)
    assert Mirror(run.folder, tmp_path / "m").sync() == ""
    assert steps(tmp_path / "m") == [2]


def test_a_run_that_saves_faster_than_the_drive_leaves_the_last_copy(run, tmp_path, monkeypatch):
    """Everything that was to be copied is gone by then: the mirror keeps what it has, and catches up later."""
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync()
    run.save(2)
    copyfile = shutil.copyfile

    def slow(source, target):
        run.save(3, 4)
        copyfile(source, target)

    monkeypatch.setattr(mirror_module.shutil, "copyfile", slow)
    assert mirror.sync() == ""
    assert steps(tmp_path / "m") == [1]
    monkeypatch.undo()
    mirror.sync()
    assert steps(tmp_path / "m") == [3, 4]


def test_what_never_rests_is_given_up_until_later(run, tmp_path, monkeypatch):
    run.export("x")
    copyfile, count = shutil.copyfile, iter(range(1000))

    def restless(source, target):
        copyfile(source, target)
        run.export(str(next(count)))

    monkeypatch.setattr(mirror_module.shutil, "copyfile", restless)
    mirror = Mirror(run.folder, tmp_path / "m")
    assert "changes faster than it can be copied" in mirror.sync()
    assert not (tmp_path / "m" / "best").exists()
    monkeypatch.undo()
    assert mirror.sync() == ""


# ---------------------------------------------------------------------- on another thread


def test_a_slow_drive_holds_up_nobody(run, tmp_path, monkeypatch):
    go, copyfile, calls = threading.Event(), shutil.copyfile, []

    def slow(source, target):
        calls.append(source)
        assert go.wait(100)
        copyfile(source, target)

    monkeypatch.setattr(mirror_module.shutil, "copyfile", slow)
    mirror = Mirror(run.folder, tmp_path / "m")
    run.save(1)
    mirror.sync_in_background()  # returns, although the drive waits for this thread
    run.save(2)
    for _ in range(5):  # asked for while it is busy: once more will do
        mirror.sync_in_background()
    assert not mirror.wait(timeout_s=0.05)
    go.set()
    assert mirror.wait()
    assert steps(tmp_path / "m") == [1, 2]
    assert len(calls) <= 2 * 2 * 3


def test_waiting_tells_of_a_failure(run, tmp_path):
    (tmp_path / "m").write_text("a file")
    mirror = Mirror(run.folder, tmp_path / "m")
    assert mirror.wait()
    mirror.sync_in_background()
    assert not mirror.wait()
    assert mirror.problem


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_dies_is_not_waited_for(run, tmp_path, monkeypatch):
    monkeypatch.setattr(
        Mirror, "sync", lambda mirror: sys.exit()
    )  # SystemExit, which `except Exception` does not catch
    mirror = Mirror(run.folder, tmp_path / "m")
    mirror.sync_in_background()
    assert not mirror.wait()
    monkeypatch.undo()
    mirror.sync_in_background()  # another one
    assert mirror.wait()


def test_a_fault_of_ours_reaches_no_run(run, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(Mirror, "_prune", lambda *_, **__: 1 / 0)
    mirror = Mirror(run.folder, tmp_path / "m")
    mirror.sync_in_background()
    assert not mirror.wait()
    assert "ZeroDivisionError" in mirror.problem
    assert said(caplog, "ZeroDivisionError") == 1


# ---------------------------------------------------------------------- back from the mirror


def test_damaged_ones_stay_behind(run, tmp_path, caplog):
    run.save(1, 2)
    Mirror(run.folder, tmp_path / "m").sync()
    os.truncate(tmp_path / "m" / "checkpoints" / "step-2" / "a.safetensors", 5)
    restore(tmp_path / "m", tmp_path / "new")
    assert steps(tmp_path / "new") == [1]
    os.truncate(tmp_path / "m" / "checkpoints" / "step-1" / "a.safetensors", 5)
    with pytest.raises(CheckpointError, match="contains no valid checkpoint"):
        restore(tmp_path / "m", tmp_path / "newer")
    with pytest.raises(CheckpointError, match="is not the mirror of a run"):
        restore(tmp_path / "new" / "checkpoints", tmp_path / "newest")
