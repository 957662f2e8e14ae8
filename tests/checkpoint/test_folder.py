"""A folder is the old one or the new one, never less, whenever its writer is killed; what is left is cleared away."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError

from trimtab.checkpoint import folder as folder_module
from trimtab.checkpoint.folder import (
    atomic_folder,
    clear_leftovers,
    folder_beside,
    refuse_unwritable,
    remove_folder,
    restore_interrupted,
    write_file,
)
from trimtab.errors import CheckpointError


def write(target, text):
    with atomic_folder(target, marker="mark", what="thing") as place:
        (place / "mark").write_text(text)
        (place / "inner").mkdir()
        (place / "inner" / "more").write_text(text)


def dead_pid():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_is_replaced_as_a_whole(tmp_path, monkeypatch, can_exchange):
    if not can_exchange:
        monkeypatch.setattr(folder_module, "_exchange", lambda one, other: False)
    for text in ("old", "new"):
        write(tmp_path / "t", text)
        assert (tmp_path / "t" / "mark").read_text() == (tmp_path / "t" / "inner" / "more").read_text() == text
        assert names(tmp_path) == {"t"}


def test_here_folders_trade_names_in_one_step(tmp_path, monkeypatch):
    """Otherwise the tests above would try the same way twice."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert not folder_module._exchange(tmp_path / "a", tmp_path / "missing")
    if sys.platform != "linux":
        pytest.skip("only Linux can")
    assert folder_module._exchange(tmp_path / "a", tmp_path / "b")
    assert names(tmp_path / "a") == {"b"}
    write(tmp_path / "t", "old")
    monkeypatch.setattr(Path, "rename", None)
    write(tmp_path / "t", "new")
    assert (tmp_path / "t" / "mark").read_text() == "new"


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="reads /proc/self/fd")
def test_everything_is_synced_before_it_shows_and_the_names_after(tmp_path, monkeypatch):
    """Which only a power cut would show otherwise."""
    events, fsync = [], os.fsync

    def recorded(descriptor):
        events.append((Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, (tmp_path / "t").exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", recorded)
    write(tmp_path / "t", "x")
    beside = f".t.writing-{os.getpid()}"
    assert {name for name, shown in events if not shown} == {"mark", "inner", "more", beside}
    assert [name for name, shown in events if shown] == [tmp_path.name, tmp_path.parent.name]


def test_an_error_leaves_nothing(tmp_path):
    write(tmp_path / "t", "old")

    def interrupted():
        with atomic_folder(tmp_path / "t", marker="mark", what="thing") as place:
            (place / "half").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert names(tmp_path) == {"t"}
    assert (tmp_path / "t" / "mark").read_text() == "old"


def test_a_rename_that_fails_leaves_the_old_one(tmp_path, monkeypatch):
    """Where folders cannot trade names in one step, the old one is moved away first, and comes back."""
    write(tmp_path / "t", "old")
    rename = Path.rename

    def fail_into_place(path, target):
        if ".writing-" in path.name:
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(folder_module, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "rename", fail_into_place)
    with pytest.raises(OSError, match="Input/output error"):
        write(tmp_path / "t", "new")
    assert names(tmp_path) == {"t"}
    assert (tmp_path / "t" / "mark").read_text() == "old"


def test_folders_of_others_are_refused_unless_told(tmp_path):
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "own").touch()
    with pytest.raises(CheckpointError, match="contains other files, which the thing would replace"):
        write(tmp_path / "t", "x")
    with atomic_folder(tmp_path / "t", marker=None, what="copy") as place:
        (place / "x").touch()
    assert names(tmp_path / "t") == {"x"}


# ---------------------------------------------------------------------- leftovers


def left(parent, name, text="x"):
    (parent / name).mkdir()
    (parent / name / "mark").write_text(text)
    return parent / name


def test_leftovers_of_the_dead_go_and_those_of_the_living_stay(tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        dead = dead_pid()
        gone = [left(tmp_path, f".step-1.{state}-{dead}") for state in ("writing", "removing")]
        stays = [left(tmp_path, name) for name in (f".step-2.writing-{living.pid}", f".own.writing-{os.getpid()}")]
        stays += [left(tmp_path, name) for name in ("step-3", ".writing-7", ".step-4.writing-x", ".cache")]
        (tmp_path / f".step-5.writing-{dead}").write_text("a file is none of ours")
        assert clear_leftovers(tmp_path) == sorted(gone)
        assert names(tmp_path) == {path.name for path in stays} | {f".step-5.writing-{dead}"}
    finally:
        living.communicate(b"\n")
    assert clear_leftovers(tmp_path) == [stays[0]]


def test_the_next_writer_removes_what_a_killed_one_left(tmp_path):
    dead = dead_pid()
    for state in ("writing", "removing"):
        left(tmp_path, f".t.{state}-{dead}")
    (tmp_path / f".t.writing-{dead_pid()}").write_text("half of a file of predictions")
    left(tmp_path, f"..t.writing-{dead}.writing-{dead}")  # of a writer that used another one inside
    stays = left(tmp_path, f".other.writing-{dead}")  # nobody writes that one now
    write(tmp_path / "t", "x")
    assert names(tmp_path) == {"t", stays.name}


def test_a_folder_beside_is_gone_afterwards_and_so_is_that_of_a_killed_process(tmp_path):
    left(tmp_path, f".t.merged.writing-{dead_pid()}")
    with folder_beside(tmp_path / "t", "merged") as place:
        assert names(tmp_path) == {place.name}
        (place / "x").touch()
    assert not names(tmp_path)


def test_two_writers_at_a_time_leave_each_other_alone(tmp_path):
    living = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        other = left(tmp_path, f".t.writing-{living.pid}")
        write(tmp_path / "t", "x")
        assert names(tmp_path) == {"t", other.name}
    finally:
        living.communicate(b"\n")


def test_a_number_that_was_given_again_is_no_owner(tmp_path, monkeypatch):
    """As if the leftover, which has the number of this process, had been there before this process began."""
    path = left(tmp_path, f".t.writing-{os.getpid()}")
    assert clear_leftovers(tmp_path) == []
    ran_at = folder_module.was_running_at
    monkeypatch.setattr(folder_module, "was_running_at", lambda pid, moment: ran_at(pid, moment - 1e6))
    assert clear_leftovers(tmp_path) == [path]


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("is_running", [False, True])
def test_an_outdated_folder(tmp_path, is_replaced, is_running):
    """It comes back if nothing replaced it, and is removed otherwise; that of a running process is left alone."""
    if is_replaced:
        write(tmp_path / "t", "new")
    outdated = left(tmp_path, f".t.outdated-{os.getpid() if is_running else dead_pid()}", "old")
    assert clear_leftovers(tmp_path) == ([outdated] if is_replaced and not is_running else [])
    assert outdated.exists() == is_running
    assert (tmp_path / "t").exists() == (is_replaced or not is_running)
    if not is_running:
        assert (tmp_path / "t" / "mark").read_text() == ("new" if is_replaced else "old")
    assert not restore_interrupted(tmp_path / "t")
    assert not restore_interrupted(tmp_path / "no" / "where")


def test_a_name_with_brackets_is_no_pattern(tmp_path):
    left(tmp_path, f".run[1].outdated-{dead_pid()}", "old")
    assert not restore_interrupted(tmp_path / "run1")
    assert restore_interrupted(tmp_path / "run[1]")


def test_removing_moves_away_first(tmp_path, monkeypatch):
    write(tmp_path / "t", "x")
    seen = []
    monkeypatch.setattr(folder_module.shutil, "rmtree", lambda path, **_: seen.append((path.name, names(tmp_path))))
    remove_folder(tmp_path / "t")
    aside = f".t.removing-{os.getpid()}"
    assert seen[-1] == (aside, {aside})


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: File too large (os error 27)"),
        shutil.Error([("from", "to", "[Errno 27] File too large: 'from' -> 'to'")]),
    ],
)
def test_a_full_disk_names_the_folder_whoever_wrote(tmp_path, error):
    with pytest.raises(OSError, match="File too large") as caught, atomic_folder(tmp_path / "a", marker=None, what="a"):
        raise error
    assert (caught.value.errno, caught.value.filename) == (errno.EFBIG, str(tmp_path / "a"))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("error", [ValueError("no"), CheckpointError("shard 1: File too large (os error 27)")])
def test_any_other_error_stays_what_it_is(tmp_path, error):
    with pytest.raises(type(error)) as caught, atomic_folder(tmp_path / "a", marker=None, what="a"):
        raise error
    assert caught.value is error


def test_an_error_never_names_a_temporary_path(tmp_path, file_size_limit):
    with file_size_limit(3), pytest.raises(OSError, match="File too large") as caught:
        write(tmp_path / "thing", "long")
    assert caught.value.filename == str(tmp_path / "thing")
    with pytest.raises(FileNotFoundError) as caught, folder_beside(tmp_path / "thing", "merged") as place:
        (place / "missing").read_text()
    assert caught.value.filename == str(tmp_path / "thing")


def test_a_file_is_the_old_one_or_the_new_one(tmp_path, file_size_limit):
    target = tmp_path / "page.html"
    write_file(target, b"old")
    with file_size_limit(3), pytest.raises(OSError, match="File too large") as caught:
        write_file(target, b"longer")
    assert caught.value.filename == str(target)
    assert str(caught.value).endswith(f": '{target}'")
    assert target.read_bytes() == b"old"
    write_file(target, b"longer")
    assert target.read_bytes() == b"longer"
    assert names(tmp_path) == {"page.html"}


def test_a_file_is_written_through_links_and_to_pipes(tmp_path):
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "page.html")
    write_file(link, b"text")
    assert link.is_symlink()
    assert (tmp_path / "page.html").read_bytes() == b"text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_file(pipe, b"text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_read_only_parent_is_found_before_the_work(as_somebody):
    place, unprivileged = as_somebody
    refuse_unwritable(place / "new" / "model")
    place.chmod(0o555)
    with unprivileged(), pytest.raises(CheckpointError, match=f"new/model cannot be written: {place} is not writable"):
        refuse_unwritable(place / "new" / "model")


def test_a_writable_folder_in_a_read_only_one_is_enough_for_files_in_it(as_somebody):
    """A mounted volume, say."""
    place, unprivileged = as_somebody
    (place / "volume").mkdir(mode=0o777)
    (place / "volume").chmod(0o777)
    place.chmod(0o555)
    with unprivileged():
        refuse_unwritable(place / "volume", is_replaced=False)
        with pytest.raises(CheckpointError, match="is not writable"):
            refuse_unwritable(place / "volume")
