"""A run's folder: what is written into it, who may use it, and how runs are listed."""

import errno
import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from trimtab.checksums import checksum_of
from trimtab.errors import CheckpointError, RecipeError
from trimtab.runs.run_folder import RunFolder, actual_state, check_free, default_folder, list_runs
from trimtab.runs.tracking_file import RunDescription, Tracking


def status_of(path):
    return json.loads((path / "run.json").read_text())


@pytest.fixture
def dead_pid():
    """The number of a process that was, and is no more."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_run_from_start_to_end(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "mine")
    assert status_of(folder.path)["state"] == "running"  # taken before anything else happens
    folder.start({"seed": 1}, num_steps=10)
    begun = status_of(folder.path)
    assert (begun["state"], begun["step"], begun["num_steps"]) == ("running", 0, 10)
    assert (begun["pid"], begun["host"]) == (os.getpid(), socket.gethostname())
    folder.record({"loss": 0.5}, step=4)
    folder.update(best_metric=0.9, metric_name="accuracy")
    assert [run.state for run in list_runs(tmp_path)] == ["running"]
    folder.record({"loss": 0.25}, step=8)
    folder.finish("finished", step=10)
    assert status_of(folder.path)["state"] == "finished"
    config, *lines = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert config["config"] == {"seed": 1}
    assert [(line["step"], line["loss"]) for line in lines] == [(4, 0.5), (8, 0.25)]
    (run,) = list_runs(tmp_path)
    assert (run.path, run.state, run.step, run.num_steps) == (folder.path, "finished", 10, 10)
    assert (run.metric_name, run.best_metric) == ("accuracy", 0.9)
    assert run.age_s >= 0


def test_small_files_are_whole_or_not_there(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    folder.write_text("plan.json", "first")

    def full_disk(self, text, encoding):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tmp_path), "write_text", full_disk)
    with pytest.raises(CheckpointError, match="No space left") as failure:
        folder.write_text("plan.json", "second")
    monkeypatch.undo()
    assert "free space" in failure.value.cure
    assert (folder.path / "plan.json").read_text() == "first"


def test_a_folder_that_is_used(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "a.txt").write_text("mine")
    for free in ("empty", "new", "new/er"):
        check_free(tmp_path / free)
    assert not (tmp_path / "new").exists()
    for used, problem in (("used", "is not empty, and is not a run"), ("used/a.txt", "is a file, and a run needs")):
        with pytest.raises(RecipeError, match=problem) as failure:
            RunFolder(tmp_path / used)
        assert "--out" in failure.value.cure
    with pytest.raises(RecipeError, match="cannot be created: Not a directory"):
        RunFolder(tmp_path / "used" / "a.txt" / "run")
    assert (tmp_path / "used" / "a.txt").read_text() == "mine"


def test_removal_leaves_what_was_there_before(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "given").mkdir()
    deep, given = RunFolder(tmp_path / "runs" / "exp" / "001"), RunFolder(tmp_path / "given")
    for folder in (deep, given):
        folder.start({}, 1)
        (folder.path / "best").mkdir()
        (folder.path / "best" / "weights").write_text("x")
        folder.remove()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["given", "runs"]
    first, second = RunFolder(tmp_path / "new" / "001"), RunFolder(tmp_path / "new" / "002")
    second.start({}, 1)
    first.remove()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["002"]
    second.finish("finished")


def test_default_folders_are_numbered(tmp_path):
    assert default_folder(tmp_path, "imdb", "mine") == tmp_path / "imdb" / "mine"
    assert default_folder(tmp_path, "imdb", None) == tmp_path / "imdb" / "001"
    for taken in ("001", "002", "004"):
        (tmp_path / "imdb" / taken).mkdir(parents=True)
    assert default_folder(tmp_path, "imdb", None) == tmp_path / "imdb" / "003"


def write_status(path, **facts):
    path.mkdir(parents=True)
    usual = {"state": "running", "step": 1, "num_steps": 9, "started": 1e9, "host": socket.gethostname()}
    (path / "run.json").write_text(json.dumps(usual | facts))


def test_states(tmp_path, dead_pid):
    """A run that claims to be running on this machine, without its process, was killed."""
    write_status(tmp_path / "killed", pid=dead_pid)
    write_status(tmp_path / "without-pid")
    write_status(tmp_path / "running", pid=os.getpid(), started=1e9 + 5)
    write_status(tmp_path / "elsewhere", pid=dead_pid, host="another-machine")
    write_status(tmp_path / "of-another-user", pid=1)
    for state in ("finished", "failed", "stopped"):
        write_status(tmp_path / "deep" / state, state=state, pid=dead_pid, started=1e9 - 5)
    states = {run.path.name: run.state for run in list_runs(tmp_path)}
    assert states == {
        "killed": "killed",
        "without-pid": "killed",
        "running": "running",
        "elsewhere": "running",
        "of-another-user": "running",
        "finished": "finished",
        "failed": "failed",
        "stopped": "stopped",
    }
    names = [run.path.name for run in list_runs(tmp_path)]
    assert names[0] == "running"
    assert set(names[-3:]) == {"finished", "failed", "stopped"}


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '{"state": "running"}', '{"state": "x", "step": 1}'])
def test_other_files_of_that_name_are_passed_over(tmp_path, text):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "run.json").write_text(text)
    write_status(tmp_path / "good", state="finished")
    assert [run.path.name for run in list_runs(tmp_path)] == ["good"]
    assert list_runs(tmp_path / "odd") == list_runs(tmp_path / "nowhere") == []


def test_numbers_that_json_has_no_word_for_become_text(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.start({"lr": float("inf")}, num_steps=1)
    folder.record({"loss": float("nan"), "norm": torch.tensor(float("-inf")), "lr": 0.5}, step=1)
    folder.finish("finished")
    text = (folder.path / "metrics.jsonl").read_text()
    lines = [json.loads(line, parse_constant=pytest.fail) for line in text.splitlines()]
    assert lines[0]["config"] == {"lr": "Infinity"}
    assert (lines[1]["loss"], lines[1]["norm"], lines[1]["lr"]) == ("NaN", "-Infinity", 0.5)


def journal_of(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if "loss" in line]


def killed_run(path, num_steps=10, saved_at=6):
    """A run that was killed; gives how far its journal had been written when its state was saved."""
    folder = RunFolder(path)
    folder.start({"seed": 1}, num_steps=20)
    for step in range(1, num_steps + 1):
        folder.record({"loss": 1 / step, "tokens_per_s": step}, step)
        if step == saved_at:
            position = folder.journal_mark()
    folder.finish("failed")
    return position


def note_sent(path, sent):
    tracking = Tracking(path, RunDescription())
    tracking.at("http://a").sent = sent
    tracking.write()


@pytest.mark.parametrize(("lines_sent", "kept"), [(0, 6), (3, 6), (6, 6), (7, 7), (8, 8), (10, 10), (99, 10)])
def test_numbers_that_a_server_may_have_stay_and_are_not_written_again(tmp_path, caplog, lines_sent, kept):
    caplog.set_level("INFO", logger="trimtab")
    position = killed_run(tmp_path / "run")
    text = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    lines = text.splitlines(keepends=True)
    if lines_sent:
        note_sent(tmp_path / "run", len(b"".join(lines[: lines_sent + 1])) + (1 if lines_sent == 8 else 0))
    folder = RunFolder(tmp_path / "run", resumes=True)
    folder.start({"seed": 1}, 20, position, 6)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b"".join(lines[: kept + 1])
    for step in range(7, 13):
        folder.record({"loss": 1 / step, "tokens_per_s": 1_000 + step}, step)
    folder.finish("finished")
    assert journal_of(folder.path) == [(step, 1 / step) for step in range(1, 13)]
    said = [message for message in caplog.messages if "are kept: the tracking server has them already" in message]
    steps = "step 7" if kept == 7 else f"steps 7-{kept}"
    assert said == ([f"metrics of {steps} are kept: the tracking server has them already"] * (kept > 6))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines, ""),
        (
            lambda lines: [*lines[:3], bytes(len(lines[3]) - 1) + b"\n", bytes(7), *lines[5:]],
            "lines 4-5 cannot be read",
        ),
        (lambda lines: [*lines[:2], lines[2].replace(b'"loss"', b'"loss\0'), *lines[3:]], "line 3 cannot be read"),
        (lambda lines: [*lines[:2], lines[2].replace(b"0.5", b"0.6"), *lines[3:]], "its first 7 lines are not those"),
        (lambda lines: [*lines[:8], bytes(40)], ""),  # of steps that are computed again
        (lambda lines: lines[:5], "has lost its last lines"),
    ],
)
def test_a_damaged_journal_is_reported(tmp_path, caplog, damage, words):
    """NULs of a power cut, a flipped byte: the run resumes, and says which of its metrics are lost."""
    caplog.set_level("INFO", logger="trimtab")
    mark = killed_run(tmp_path / "run")
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    folder = RunFolder(tmp_path / "run", resumes=True)
    folder.start({"seed": 1}, 20, mark, 6)
    folder.record({"loss": 1 / 7}, 7)
    again = folder.journal_mark()
    folder.finish("finished")
    said = [message for message in caplog.messages if "metrics.jsonl" in message]
    assert len(said) == bool(words)
    assert words in caplog.text
    assert again == (path.stat().st_size, checksum_of(path))


def test_other_numbers_of_a_step_that_is_taken_again_are_written(tmp_path):
    """As after a change of the learning rate: both are true, and both are on the server."""
    position = killed_run(tmp_path / "run")
    note_sent(tmp_path / "run", (tmp_path / "run" / "metrics.jsonl").stat().st_size)
    folder = RunFolder(tmp_path / "run", resumes=True)
    folder.start({"seed": 1}, 20, position, 6)
    folder.record({"loss": 5.0}, 7)
    folder.finish("finished")
    assert journal_of(folder.path)[-1] == (7, 5.0)
    assert len(journal_of(folder.path)) == 11


def test_killed_twice(tmp_path):
    """The second state was saved when the journal already held lines of later steps."""
    position = killed_run(tmp_path / "run")
    size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
    note_sent(tmp_path / "run", size)
    for saved_at, until in ((6, 8), (8, 12)):
        folder = RunFolder(tmp_path / "run", resumes=True)
        folder.start({"seed": 1}, 20, position, saved_at)
        for step in range(saved_at + 1, until + 1):
            folder.record({"loss": 1 / step, "tokens_per_s": 0}, step)
        position = folder.journal_mark()
        folder.finish("failed")
    assert journal_of(folder.path) == [(step, 1 / step) for step in range(1, 13)]


def test_killed_before_any_state_was_saved(tmp_path):
    killed_run(tmp_path / "run")
    note_sent(tmp_path / "run", (tmp_path / "run" / "metrics.jsonl").stat().st_size)
    folder = RunFolder(tmp_path / "run", resumes=True)
    folder.start({"seed": 1}, 20)
    for step in range(1, 13):
        folder.record({"loss": 1 / step, "tokens_per_s": 0}, step)
    folder.finish("finished")
    assert journal_of(folder.path) == [(step, 1 / step) for step in range(1, 13)]
    assert json.loads((folder.path / "metrics.jsonl").read_text().splitlines()[0])["config"] == {"seed": 1}


def test_how_far_it_is_is_written_once_in_a_while_and_at_the_end(tmp_path, monkeypatch):
    """By a thread: the training does not wait for the disk."""
    monkeypatch.setattr("trimtab.runs.run_folder._STEP_WRITTEN_EVERY_S", 3600.0)
    seldom = RunFolder(tmp_path / "seldom")
    seldom.start({}, num_steps=9)
    for step in (1, 2, 3):
        seldom.record({"loss": 1.0}, step)
    assert status_of(seldom.path)["step"] == 0
    seldom.finish("finished")
    assert status_of(seldom.path)["step"] == 3
    monkeypatch.setattr("trimtab.runs.run_folder._STEP_WRITTEN_EVERY_S", 0.01)
    often = RunFolder(tmp_path / "often")
    often.start({}, num_steps=9)
    often.record({"loss": 1.0}, 4)
    while status_of(often.path)["step"] != 4:
        time.sleep(0.01)
    often.finish("finished")


def test_a_disk_without_room_for_it_ends_no_run(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO", logger="trimtab")
    folder = RunFolder(tmp_path / "run")

    def full(name, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "_write", full)
    folder.update(num_steps=3)
    assert caplog.messages == [f"{folder.path / 'run.json'} cannot be written: No space left on device"]
    monkeypatch.undo()
    folder.finish("finished")
    assert status_of(folder.path)["num_steps"] == 3


def test_how_a_run_stands(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert actual_state(folder.path) == ("running", "")
    (folder.path / "run.lock").unlink()
    assert actual_state(folder.path) == ("killed", "killed: its process ended without reporting an error")
    folder.finish("failed", error="ValueError: x")
    assert actual_state(folder.path) == ("failed", "ValueError: x")


def test_every_command_says_the_same_of_a_run(tmp_path, dead_pid):
    """The report and the uploader ask for `actual_state`, `trimtab runs` lists summaries."""
    folder = RunFolder(tmp_path / "run")
    folder.start({}, num_steps=9)
    lock = folder.path / "run.lock"
    holder = json.loads(lock.read_text())
    for changed, state in (({}, "running"), ({"pid": dead_pid}, "killed"), ({"host": "another", "pid": 1}, "running")):
        lock.write_text(json.dumps(holder | changed))
        assert (actual_state(folder.path)[0], [run.state for run in list_runs(tmp_path)]) == (state, [state])
    lock.write_text(json.dumps(holder))
    folder.finish("stopped")
    assert (actual_state(folder.path)[0], [run.state for run in list_runs(tmp_path)]) == ("stopped", ["stopped"])


def test_of_two_runs_that_find_the_same_folder_free_one_gets_it(tmp_path, monkeypatch):
    first = RunFolder(tmp_path / "run")
    monkeypatch.setattr("trimtab.runs.run_folder.check_free", lambda path: None)  # as it was a moment before
    with pytest.raises(CheckpointError, match="is in use by process"):
        RunFolder(tmp_path / "run")
    assert status_of(first.path)["state"] == "running"
