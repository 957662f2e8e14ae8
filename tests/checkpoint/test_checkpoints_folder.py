"""Of a run's checkpoints the newest valid one is found whatever happened to the others, and the right ones are kept."""

import logging
import shutil

import pytest
import torch

from trimtab.checkpoint import checkpoints_folder as shelf_module
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.checkpoint.codec import decode, encode
from trimtab.checkpoint.store import write_checkpoint
from trimtab.errors import CheckpointError


@pytest.fixture
def shelf(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    return CheckpointsFolder(tmp_path / "checkpoints", keep=2)


def put(shelf, *steps, **facts):
    for step in steps:
        parts = {"a": encode({"x": torch.full((8,), float(step))})}
        write_checkpoint(shelf.place(step), parts, {"step": step, "metrics": {"accuracy": step / 100}} | facts)


def steps(shelf):
    return [checkpoint.step for checkpoint in shelf.checkpoints()]


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


# ---------------------------------------------------------------------- what is there


def test_they_are_listed_in_order_with_what_is_known(shelf):
    put(shelf, 100, 20, 3)
    found = shelf.checkpoints()
    assert [checkpoint.step for checkpoint in found] == [3, 20, 100]
    assert [checkpoint.metrics for checkpoint in found] == [{"accuracy": 0.03}, {"accuracy": 0.2}, {"accuracy": 1.0}]
    assert all(checkpoint.is_valid and checkpoint.path == shelf.place(checkpoint.step) for checkpoint in found)
    sizes = [sum(path.stat().st_size for path in c.path.iterdir()) for c in found]
    assert [checkpoint.num_bytes for checkpoint in found] == sizes
    assert shelf.newest().facts["step"] == 100
    put(shelf, 3, metrics="none")
    assert shelf.checkpoints()[0].metrics == {}


def test_what_is_none_of_them_is_not_listed(shelf):
    put(shelf, 5)
    for name in ("step-", "step-x", "xstep-7", "step-7.old", ".step-7.writing-1", "notes"):
        (shelf.folder / name).mkdir()
    (shelf.folder / "step-8").write_text("a file")
    assert steps(shelf) == [5]


def test_an_empty_shelf(shelf):
    assert shelf.checkpoints() == []
    assert shelf.newest() is None
    assert shelf.open() is None
    assert shelf.tidy() == []
    with pytest.raises(CheckpointError, match="has no checkpoint of step 3\n.*none"):
        shelf.open(3)


def test_checksums_are_computed_on_demand(shelf, monkeypatch):
    put(shelf, 1)
    flip(shelf.place(1) / "a.safetensors")
    assert shelf.checkpoints()[0].is_valid
    found = shelf.checkpoints(checksums=True)[0]
    assert "a.safetensors is damaged: its checksum" in found.problem
    assert found.num_bytes > 0
    assert found.metrics == {}
    assert not shelf.checkpoints()[0].is_valid, "what was found once is not forgotten"
    put(shelf, 1)
    assert shelf.checkpoints()[0].is_valid, "but one that was written anew is another"
    flip(shelf.place(1) / "a.safetensors")
    assert not shelf.checkpoints(checksums=True)[0].is_valid
    whole = bytearray((shelf.place(1) / "a.safetensors").read_bytes())
    whole[-1] ^= 1
    (shelf.place(1) / "a.safetensors").unlink()
    (shelf.place(1) / "a.safetensors").write_bytes(whole)
    assert shelf.checkpoints()[0].is_valid, "and so is one that was mended"


def test_a_renamed_one_is_not_believed(shelf):
    put(shelf, 1, 2)
    shelf.place(2).rename(shelf.place(9))
    assert shelf.checkpoints()[1].problem == f"{shelf.place(9)} was saved at step 2"
    assert shelf.newest().step == 1
    assert shelf.open().facts["step"] == 1
    with pytest.raises(CheckpointError, match="saved at step 2\n.*step-2"):
        shelf.open(9)


# ---------------------------------------------------------------------- the newest valid one

DAMAGE = {
    "flipped bit": lambda place: flip(place / "a.safetensors"),
    "missing file": lambda place: (place / "state.json").unlink(),
    "empty": lambda place: (shutil.rmtree(place), place.mkdir()),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(shelf, name, caplog):
    put(shelf, 1, 2, 3)
    DAMAGE[name](shelf.place(3))
    assert shelf.newest().step == 2
    assert sum("skipping step-3: " in message for message in caplog.messages) == 1
    opened = shelf.open()
    assert opened.facts["step"] == 2
    assert (decode(opened.trees["a"], opened.tensor_reader("a"))["x"] == 2).all()
    with pytest.raises(CheckpointError):
        shelf.open(3)
    assert shelf.open(1).facts["step"] == 1


# ---------------------------------------------------------------------- what is kept


@pytest.mark.parametrize(
    ("keep", "best", "left"),
    [
        (2, None, [4, 5]),
        (1, None, [5]),
        (0, None, [5]),
        (2, 1, [1, 4, 5]),
        (2, 5, [4, 5]),
        (2, 77, [4, 5]),
        (9, 2, [1, 2, 3, 4, 5]),
    ],
)
def test_the_newest_and_the_best_are_kept(shelf, keep, best, left):
    shelf = CheckpointsFolder(shelf.folder, keep=keep)
    put(shelf, 1, 2, 3, 4, 5)
    assert shelf.tidy(best) == sorted({1, 2, 3, 4, 5} - set(left))
    assert steps(shelf) == left
    assert {path.name for path in shelf.folder.iterdir()} == {f"step-{step}" for step in left}
    assert shelf.tidy(best) == []


def test_the_newest_valid_one_is_never_removed(shelf):
    """Newer ones that are not valid do not count, neither those found by size nor those found by checksum."""
    put(shelf, 1, 2, 3, 4, 5)
    (shelf.place(5) / "state.json").unlink()
    flip(shelf.place(4) / "a.safetensors")
    assert shelf.newest().step == 3
    assert shelf.tidy() == [1]
    assert steps(shelf) == [2, 3, 4, 5]
    assert shelf.newest().step == 3


def test_damaged_ones_go_when_a_newer_one_is_there(shelf):
    put(shelf, 1, 2, 3, 4)
    (shelf.place(2) / "state.json").unlink()
    (shelf.place(1) / "state.json").unlink()
    assert shelf.tidy(best=1) == [2]
    assert steps(shelf) == [1, 3, 4], "the best one stays whatever it is"


def test_nothing_valid_nothing_removed(shelf):
    put(shelf, 1, 2, 3)
    for step in (1, 2, 3):
        (shelf.place(step) / "state.json").unlink()
    assert shelf.newest() is None
    assert shelf.open() is None
    assert shelf.tidy() == []
    assert steps(shelf) == [1, 2, 3]


def test_what_cannot_be_removed_is_named(as_somebody, caplog):
    caplog.set_level(logging.INFO)
    place, unprivileged = as_somebody
    shelf = CheckpointsFolder(place / "checkpoints", keep=1)
    put(shelf, 1, 2)
    shelf.folder.chmod(0o555)
    with unprivileged():
        assert shelf.tidy() == []
    assert any("step-1 cannot be removed: Permission denied" in message for message in caplog.messages)
    assert steps(shelf) == [1, 2]


def test_a_run_that_goes_another_way_drops_what_came_later(shelf):
    put(shelf, 10, 20, 30, 40)
    (shelf.place(40) / "state.json").unlink()
    assert shelf.drop_after(20) == [30, 40]
    assert steps(shelf) == [10, 20]


# ---------------------------------------------------------------------- room


def test_a_disk_that_is_too_small(small_disk):
    free = shutil.disk_usage(small_disk).free
    shelf = CheckpointsFolder(small_disk / "run" / "checkpoints", keep=2)
    assert shelf.disk_shortage(free // 3) == ""
    shortage = shelf.disk_shortage(free // 3 + 4096)
    assert shortage.startswith(f"{shelf.folder} has 1.0 MiB free, but 3 checkpoints need 1.0 MiB")
    assert not shelf.folder.exists()


def test_existing_checkpoints_count_as_free_space(shelf, monkeypatch):
    put(shelf, 1, 2)
    size = shelf.checkpoints()[0].num_bytes
    monkeypatch.setattr(shelf_module.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(0, 0, size))
    assert shelf.disk_shortage(size) == ""
    assert shelf.disk_shortage(size + 1)
    assert CheckpointsFolder(shelf.folder, keep=3).disk_shortage(size)
    assert CheckpointsFolder(shelf.folder, keep=1).disk_shortage(size // 4) == ""
