"""The small files of a run's folder, damaged on disk: what the checkpoints know replaces them."""

import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fault_stage import status_of
from test_scenarios import change_a_key, cut_after_the_data, cut_in_half, empty, forget

from trimtab.build.resume_rules import find_differences
from trimtab.build.resumed_recipe import load_resumed_recipe
from trimtab.build.start_point import find_start_point
from trimtab.checkpoint.export import weight_checksums
from trimtab.errors import CheckpointError, RecipeError
from trimtab.recipe.load import load_recipe
from trimtab.runs.run_folder import RunFolder, actual_state, find_run, list_runs


def fill_with_garbage(path):
    path.write_bytes(b"\xff\xfe\x00" * 50)


@pytest.fixture(scope="module")
def killed(stage):
    """A run that was killed after step 33; its newest checkpoint is that of step 30."""
    recipe = stage.recipe()
    assert stage.train(recipe, at={"33": "saved 30; die"}).wait() == -9
    return Path(recipe["out"])


@pytest.fixture
def run(killed, tmp_path, caplog):
    """A copy of the killed run, to be damaged."""
    caplog.set_level("INFO", logger="trimtab")
    return shutil.copytree(killed, tmp_path / "copy")


def forget_in(run, *facts):
    forget(*facts)(SimpleNamespace(run=run))


@pytest.mark.parametrize("damage", [empty, cut_in_half, change_a_key, fill_with_garbage, Path.unlink])
@pytest.mark.parametrize("source", ["checkpoints", "journal and plan"])
def test_a_lost_run_json_is_rebuilt(run, damage, source):
    """Everything that is reported of the run later is what the file said."""
    if source != "checkpoints":
        forget_in(run, "run", "settings")
    before = status_of(run)
    damage(run / "run.json")
    found = find_run(run)
    keys = {"num_steps", "best_step", "best_metric", "metric_name"}
    if source == "checkpoints":
        keys |= {"id", "started", "higher_is_better", "recipe_checksum"}
        keys -= {"best_step", "best_metric"} if before["best_step"] > 30 else set()
    assert {key: found[key] for key in keys} == {key: before[key] for key in keys}
    # the journal has a line of step 33
    assert (found["state"], found["step"], found["saved_step"]) == ("killed", 33, 30)
    assert abs(found["started"] - before["started"]) < 60
    assert [one.state for one in list_runs(run.parent) if one.path == run] == ["killed"]
    assert actual_state(run)[0] == "killed", "in the report and on the server, too"


def test_checkpoints_alone_are_no_run(tmp_path, run):
    """A user's own training loop saves checkpoints too, without a run.json."""
    shutil.copytree(run / "checkpoints", tmp_path / "own" / "loop" / "checkpoints")
    forget_files = tmp_path / "own" / "loop"
    shutil.copy(run / "run.json", forget_files)
    forget_in(forget_files, "run", "settings")
    (forget_files / "run.json").unlink()
    assert find_run(forget_files) is None
    assert list_runs(tmp_path / "own") == []


def test_a_recipe_cut_off_anywhere_changes_nothing(run, caplog):
    """Wherever it ends: the settings are those of the checkpoint, and a line reports it."""
    path = run / "recipe.yaml"
    whole = path.read_bytes()
    wanted = load_recipe(path, {}, []).recipe
    lines = whole.splitlines(keepends=True)
    places = [len(b"".join(lines[:number])) for number in range(0, len(lines), 3)] + list(range(7, len(whole), 297))
    for place in places:
        path.write_bytes(whole[:place])
        caplog.clear()
        found = load_resumed_recipe(run, None, []).recipe
        assert not find_differences(wanted, found), place
        told = [message for message in caplog.messages if "using the settings saved in step-30" in message]
        left = load_or_none(path)
        assert len(told) == (left is None or bool(find_differences(wanted, left))), place
    assert load_resumed_recipe(run, None, ["train.epochs=9"]).recipe.train.epochs == 9


def load_or_none(path):
    try:
        return load_recipe(path, {}, []).recipe
    except RecipeError:
        return None


def other_epochs(path):
    path.write_text(path.read_text().replace("epochs: 4.0", "epochs: 5.0"))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (Path.unlink, "recipe.yaml is missing: using the settings saved in step-30"),
        (other_epochs, "differs from the settings of the run in train.epochs"),
    ],
)
def test_a_missing_recipe_and_that_of_another_run(run, caplog, damage, words):
    """A valid recipe need not be the recipe of this run."""
    wanted = load_recipe(run / "recipe.yaml", {}, []).recipe
    damage(run / "recipe.yaml")
    assert not find_differences(wanted, load_resumed_recipe(run, None, []).recipe)
    assert words in caplog.text


def test_a_damaged_recipe_and_no_settings_anywhere(run, caplog):
    """The difference to what the run wrote is reported; without any checkpoint the run is not started with it."""
    cut_after_the_data(SimpleNamespace(run=run))
    forget_in(run, "settings")
    load_resumed_recipe(run, None, [])
    assert "recipe.yaml was changed since the run wrote it" in caplog.text
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(RecipeError, match="there is no checkpoint yet"):
        load_resumed_recipe(run, None, [])


def test_a_saved_run_without_checkpoints_does_not_start_from_scratch(run):
    """A new start would replace the best model."""
    wanted = load_recipe(run / "recipe.yaml", {}, []).recipe.model_copy(update={"out": str(run)})
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(CheckpointError, match="was saved at step .* has no checkpoint") as caught:
        find_start_point(wanted, resume=True, fresh=False)
    assert f"trimtab train {run / 'recipe.yaml'} --out {run} --fresh" in caught.value.cure


def test_small_files_are_synced_before_they_are_renamed(tmp_path, monkeypatch):
    """Otherwise a power cut after a rename could leave an empty file under the name of a good one."""
    synced = {}

    def fsync(descriptor, real=os.fsync):
        real(descriptor)
        stat = os.fstat(descriptor)
        synced[stat.st_ino] = stat.st_size

    monkeypatch.setattr(os, "fsync", fsync)
    folder = RunFolder(tmp_path / "run")
    for name, write in {
        "run.json": lambda: folder.update(num_steps=3),
        "recipe.yaml": lambda: folder.write_recipe("seed: 1\n"),
        "plan.json": lambda: folder.write_text("plan.json", "{}"),
    }.items():
        is_new = not (folder.path / name).exists()
        synced.clear()
        write()
        stat = (folder.path / name).stat()
        assert synced.get(stat.st_ino) == stat.st_size, name
        assert (folder.path.stat().st_ino in synced) == is_new, name
    folder.finish("finished")


def test_checksums_of_the_best_model_are_recorded_during_the_run(tmp_path, monkeypatch):
    """A run that is killed has them as well, of the model that is the best by then."""
    monkeypatch.setattr("trimtab.runs.run_folder._STEP_WRITTEN_EVERY_S", 0.01)
    folder = RunFolder(tmp_path / "run")
    folder.best.mkdir()
    for step in (5, 10):
        (folder.best / "model.safetensors").write_bytes(bytes(step))
        folder.update(best_step=step)
        while (status_of(folder.path).get("best_files") or {}).get("step") != step:
            time.sleep(0.01)
        assert status_of(folder.path)["best_files"]["files"] == weight_checksums(folder.best)
    folder.finish("finished")
