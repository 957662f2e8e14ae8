"""Disks that fill up, folders that vanish or may not be read, clocks that jump: a message, and never a traceback."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from fault_stage import assert_same_end, goes_on_from, saved_steps, status_of
from sudden_losses import fill

from small_disk import mounted


def start(stage, recipe, *, cache=None, **arguments):
    environment = {"TRIMTAB_CACHE": str(cache or stage.folder / "cache")}
    return stage.server.start("sudden_losses:train", recipe=recipe, environment=environment, **arguments)


def finish(stage, recipe, code=0, **arguments):
    """Train until the end; what it said."""
    child = start(stage, recipe, **arguments)
    assert child.wait() == code, child.said[-4000:]
    assert "Traceback" not in child.said, child.said[-4000:]
    return child.said


@pytest.fixture
def stopped(stage):
    """The recipe of a run that was stopped after step 22."""
    recipe = stage.recipe()
    finish(stage, recipe, 75, at={"22": "signal SIGTERM"})
    return recipe


# ---------------------------------------------------------------------- full disks


@pytest.mark.parametrize("num_pages", [0, 1, 2, 3])
def test_no_room_at_the_start(stage, tmp_path, num_pages):
    """Whichever file comes first that finds no room: the lock, the status, the recipe, the plan."""
    with mounted(tmp_path / "disk", "1m") as disk:
        fill(disk, 4096 * num_pages)
        said = finish(stage, stage.recipe(out=disk / "run"), 2)
    assert "No space left on device\n  cure: free space on that disk, or choose another --out" in said


def test_a_start_without_room_leaves_nothing_behind(stage, tmp_path):
    with mounted(tmp_path / "disk", "1m") as disk:
        fill(disk)
        finish(stage, stage.recipe(out=disk / "new" / "run"), 2)
        assert {path.name for path in disk.iterdir()} == {"filler"}


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [0, 1])
def test_no_room_for_the_cache(stage, tmp_path, num_pages):
    """It costs the cache, never the run."""
    recipe = stage.recipe()
    with mounted(tmp_path / "disk", "1m") as disk:
        fill(disk, 4096 * num_pages)
        said = finish(stage, recipe, cache=disk / "cache")
        assert f"tokens are not cached in {disk / 'cache'}" in said
        assert not list((disk / "cache").rglob(".*"))  # nothing that is half written
    assert "No space left on device" in said
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_no_room_for_what_is_said(stage, tmp_path):
    """A log on a disk that is full for a while loses nothing of the run, and what is said later is in it."""
    recipe = stage.recipe()
    with mounted(tmp_path / "disk", "1m") as disk:
        finish(stage, recipe, output=str(disk / "log"), at={"12": f"fill {disk}", "27": f"remove {disk}/filler"})
        said = (disk / "log").read_text(errors="replace")
    assert "step 39/40" in said
    assert "Traceback" not in said
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["check", "{recipe}"], 1), (["check", "nothing.yaml"], 2)])
def test_no_room_for_what_a_command_says(stage, tmp_path, words, code):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {stage.models['bert']}\ndata: {{train: {stage.rows}}}\n")
    words = [word.format(recipe=recipe) for word in words]
    output = "/dev/full"
    child = stage.server.start("sudden_losses:command", words=words, output=output)
    assert child.wait() == code
    child = stage.server.start("sudden_losses:command", words=words, output=output, also_errors=False)
    assert child.wait() == code
    assert "Traceback" not in child.said
    assert child.said.count("cure: ") == 1


# ---------------------------------------------------------------------- folders that vanish or may not be read


@pytest.mark.slow
def test_a_run_folder_that_vanishes(stage):
    """What can be written again is; that its numbers are lost is said."""
    recipe = stage.recipe()
    out = Path(recipe["out"])
    said = finish(stage, recipe, at={"12": f"sleep 0.3; vanish {out}"})
    assert f"{out}/metrics.jsonl was removed while the run went on: its numbers so far are lost" in said
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 40
    assert saved_steps(out) == [35, 40]
    assert status_of(out)["state"] == "finished"


@pytest.mark.slow
def test_a_cache_that_vanishes(stage, tmp_path):
    recipe = stage.recipe()
    finish(stage, recipe, cache=tmp_path / "cache", at={"3": f"vanish {tmp_path / 'cache'}"})
    assert_same_end(recipe["out"], stage.whole())


@pytest.fixture
def closed():
    """Takes all permissions away, and gives them back."""
    paths = []

    def close(path):
        paths.append(path)
        path.chmod(0)

    yield close
    for path in filter(Path.exists, paths):
        path.chmod(0o755)


def test_checkpoints_that_may_not_be_read(stage, stopped, closed):
    folder = Path(stopped["out"]) / "checkpoints"
    closed(folder)
    said = finish(stage, stopped, 2, command="resume", nobody_special=True)
    assert f"{folder} cannot be read: Permission denied\n  cure: make the folder readable for this user" in said


@pytest.mark.slow
def test_a_checkpoint_that_may_not_be_read_is_passed_over(stage, stopped, closed):
    folder = Path(stopped["out"]) / "checkpoints"
    closed(folder / "step-22")
    said = finish(stage, stopped, command="resume", nobody_special=True)
    assert f"skipping step-22: {folder / 'step-22'} cannot be read: Permission denied" in said
    assert goes_on_from(said) == 20


@pytest.mark.slow
def test_a_cache_that_may_not_be_read(stage, tmp_path, closed):
    cache = tmp_path / "cache"
    shutil.copytree(stage.folder / "cache", cache)
    closed(cache / "tokens")
    recipe = stage.recipe()
    said = finish(stage, recipe, cache=cache, nobody_special=True)
    assert f"tokens are not cached in {cache}: Permission denied" in said
    assert_same_end(recipe["out"], stage.whole())


def test_numbers_that_may_not_be_written(stage, stopped, closed):
    closed(Path(stopped["out"]) / "metrics.jsonl")
    said = finish(stage, stopped, 2, command="resume", nobody_special=True)
    assert "metrics.jsonl cannot be written: Permission denied\n  cure: make the folder writable" in said


# ---------------------------------------------------------------------- clocks and signals


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [-400 * 86_400, 4_000 * 86_400])
def test_a_clock_that_jumps(stage, seconds):
    """In the middle of a run, and back between two starts of it."""
    recipe = stage.recipe()
    finish(stage, recipe, 75, at={"12": f"clock {seconds}", "22": "signal SIGTERM"})
    said = finish(stage, recipe, resume=True, clock=-seconds)
    assert goes_on_from(said) == 22
    assert_same_end(recipe["out"], stage.whole())
    shown = stage.server.start_command("runs", str(Path(recipe["out"]).parent))
    assert shown.wait() == 0, shown.err


@pytest.mark.slow
@pytest.mark.parametrize("file", ["step-10", "best.writing"])
def test_stopped_in_the_middle_of_a_save(stage, file):
    """The save is finished first, then the state after that step is saved as well."""
    recipe = stage.recipe()
    said = finish(stage, recipe, 75, stop_at_open=file)
    step = saved_steps(recipe["out"])[-1]
    assert f"saved after step {step}; go on with: trimtab resume" in said
    assert goes_on_from(finish(stage, recipe, command="resume")) == step
    assert_same_end(recipe["out"], stage.whole())


# ---------------------------------------------------------------------- two starts at once


@pytest.mark.slow
def test_started_twice_with_resume(stage, tmp_path):
    """The one that comes second is told who trains there, and not to use the option that it was given."""
    for _ in range(3):
        recipe = stage.recipe()
        children = [start(stage, recipe, resume=True, at={"20": "sleep 1"}) for _ in range(2)]
        codes = sorted(child.wait() for child in children)
        assert codes == [0, 2], [child.said for child in children]
        (refused,) = (child for child in children if child.code == 2)
        (trained,) = (child for child in children if child.code == 0)
        assert "--resume" not in refused.said
        assert f"process {trained.pid}" in refused.said or "was taken by another run just now" in refused.said
        assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_a_run_that_is_being_trained_is_not_to_be_resumed(stage):
    recipe = stage.recipe()
    first = start(stage, recipe, at={"20": "sleep 60"})
    first.wait_until(lambda: saved_steps(recipe["out"]) == [10, 15])
    said = finish(stage, recipe, 2)
    assert re.search(rf"not finished \(step \d+ of 40\): process {first.pid} of this machine trains it", said)
    assert f"cure: wait until it is done, or stop it (kill {first.pid}), then run this again" in said
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert "cure: --resume to go on" in finish(stage, recipe, 2)
