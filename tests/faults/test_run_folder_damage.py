"""The small files of a run's folder, damaged on the disk: what the saved states know takes their place."""

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml
from fault_stage import STANDARD, assert_same_end, assert_went_on, goes_on_from, status_of

from trimtab.build.resumed_recipe import load_settings
from trimtab.checkpoint.store import MANIFEST, _signed
from trimtab.errors import RecipeError
from trimtab.recipe.load import load_recipe
from trimtab.recipe.resume_rules import all_differences
from trimtab.runs.run_folder import RunFolder, find_run, list_runs


def empty(path):
    path.write_bytes(b"")


def cut_in_half(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip(path):
    content = bytearray(path.read_bytes())
    content[content.index(b'"state"') + 3] ^= 0x10
    path.write_bytes(content)


def fill_with_garbage(path):
    path.write_bytes(b"\xff\xfe\x00" * 50)


DAMAGES = {
    "empty": empty,
    "cut": cut_in_half,
    "flipped": flip,
    "garbage": fill_with_garbage,
    "deleted": Path.unlink,
}


@pytest.fixture(scope="module")
def killed(stage):
    """A run that was killed after step 33; its newest state is that of step 30."""
    recipe = stage.recipe()
    assert stage.train(recipe, at={"33": "saved 30; die"}).wait() == -9
    return recipe


@pytest.fixture
def run(stage, killed):
    """A copy of the killed run, to be damaged."""
    recipe = stage.recipe()
    shutil.copytree(killed["out"], recipe["out"])
    return recipe


def without_facts(run, *names):
    """Make states as versions wrote them that did not keep these facts."""
    for path in Path(run).glob(f"checkpoints/*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        del manifest["checksum"]
        for name in names:
            del manifest["facts"][name]
        path.write_bytes(_signed(manifest))


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kept", ["by the states", "by the journal and the plan"])
def test_a_lost_run_json_is_rebuilt(run, damage, kept):
    """Everything that is said of the run later is what the file said."""
    folder = Path(run["out"])
    if kept != "by the states":
        without_facts(folder, "run", "settings")
    before = status_of(folder)
    DAMAGES[damage](folder / "run.json")
    found = find_run(folder)
    keys = {"num_steps", "saved_step", "best_step", "best_metric", "metric_name"}
    if kept == "by the states":
        keys |= {"id", "started", "higher_is_better", "recipe_checksum"}
        keys -= {"best_step", "best_metric"} if before["best_step"] > 30 else set()
    assert {key: found[key] for key in keys} == {key: before[key] for key in keys}
    assert (found["state"], found["step"]) == ("killed", 33)  # of which the journal has a line
    assert abs(found["started"] - before["started"]) < 60
    assert [one.path for one in list_runs(folder.parent) if one.path == folder] == [folder]


@pytest.mark.parametrize(
    ("command", "damage"),
    [("resume", "empty"), ("fit", "deleted"), pytest.param("resume", "flipped", marks=pytest.mark.slow)],
)
def test_a_run_without_its_run_json_resumes(stage, run, command, damage):
    folder = Path(run["out"])
    before = status_of(folder)
    DAMAGES[damage](folder / "run.json")
    said = stage.finish(run, command=command)
    assert said.count("run.json is missing or damaged") == 1
    assert assert_went_on(folder, said) == 30
    assert_same_end(folder, stage.whole())
    assert (status_of(folder)["id"], status_of(folder)["started"]) == (before["id"], before["started"])


def test_a_run_without_its_run_json_is_not_taken_for_other_files(stage, run):
    """Who forgets --resume is told that there is a run, not to remove the folder."""
    DAMAGES["empty"](Path(run["out"]) / "run.json")
    child = stage.train(run, resume=False)
    assert child.wait() == 2
    assert "holds a run that is not finished (step 33 of 40)" in child.said
    assert "--resume to go on" in child.said
    assert "remove the folder" not in child.said


def test_states_alone_are_no_run(tmp_path, run):
    """A loop of the user's own saves states too, beside which there is no run.json."""
    shutil.copytree(Path(run["out"]) / "checkpoints", tmp_path / "own" / "checkpoints")
    without_facts(tmp_path / "own", "run", "settings")
    assert find_run(tmp_path / "own") is None
    assert list_runs(tmp_path) == []


@pytest.mark.slow
def test_all_states_damaged_and_no_run_json(stage, run):
    """What could perhaps be mended is not given up for a lost file."""
    folder = Path(run["out"])
    (folder / "run.json").unlink()
    for manifest in folder.glob(f"checkpoints/*/{MANIFEST}"):
        manifest.unlink()
    child = stage.train(run)
    assert child.wait() == 2
    assert "mend or restore one of them" in child.said


def test_a_recipe_cut_off_anywhere_changes_nothing(run, caplog):
    """Wherever it ends: the settings are those that the state was trained with, and a line says so."""
    caplog.set_level("INFO", logger="trimtab")
    folder = Path(run["out"])
    path = folder / "recipe.yaml"
    whole = path.read_bytes()
    wanted = load_recipe(path, {}, []).recipe
    lines = whole.splitlines(keepends=True)
    places = [len(b"".join(lines[:number])) for number in range(0, len(lines), 3)] + list(range(7, len(whole), 297))
    for place in places:
        path.write_bytes(whole[:place])
        caplog.clear()
        found = load_settings(folder, None, []).recipe
        assert not all_differences(wanted, found), place
        told = [message for message in caplog.messages if "the settings saved in step-30 are used" in message]
        left = load_or_none(path)
        assert len(told) == (left is None or bool(all_differences(wanted, left))), place
    assert load_settings(folder, None, ["train.epochs=9"]).recipe.train.epochs == 9


def load_or_none(path):
    try:
        return load_recipe(path, {}, []).recipe
    except RecipeError:
        return None


def cut_after_the_data(path):
    """What is left is a recipe: the defaults for everything else."""
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: next(n for n, line in enumerate(lines) if line.startswith("train:"))]))
    load_recipe(path, {}, [])


def test_a_run_with_a_damaged_recipe_ends_as_it_would_have(stage, run):
    folder = Path(run["out"])
    cut_after_the_data(folder / "recipe.yaml")
    said = stage.finish(run, command="resume")
    (told,) = [line for line in said.splitlines() if "the settings saved in step-30 are used" in line]
    assert "train.epochs, " in told
    assert assert_went_on(folder, said) == 30
    assert_same_end(folder, stage.whole())
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["train"]["epochs"] == STANDARD["train"]["epochs"]


def test_a_missing_recipe(run, caplog):
    caplog.set_level("INFO", logger="trimtab")
    folder = Path(run["out"])
    wanted = load_recipe(folder / "recipe.yaml", {}, []).recipe
    (folder / "recipe.yaml").unlink()
    assert not all_differences(wanted, load_settings(folder, None, []).recipe)
    assert "recipe.yaml is missing: the settings saved in step-30 are used" in caplog.text


def test_a_recipe_of_another_run(stage, run, caplog):
    """That it is whole does not make it the recipe of this run."""
    caplog.set_level("INFO", logger="trimtab")
    folder = Path(run["out"])
    text = (folder / "recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(text.replace("epochs: 4.0", "epochs: 5.0"))
    assert load_settings(folder, None, []).recipe.train.epochs == 4
    assert "differs from the settings of the run in train.epochs" in caplog.text


@pytest.mark.slow
def test_what_was_set_last_counts_also_after_a_kill(stage, run):
    """A change by --set holds although no state was saved since: the run has written it down itself."""
    change = {"sets": ["train.epochs=5", "checkpoint.every=50 steps"]}
    child = stage.train(run, command="resume", options=change, at={"33": "die"})
    assert child.wait() == -9
    said = stage.finish(run, command="resume")
    assert "train.epochs: 4.0 → 5.0 (takes effect from here on)" in said
    assert "are used" not in said
    assert status_of(run["out"])["step"] == 50


@pytest.mark.slow
def test_states_without_settings_still_resume(stage, run):
    """Those of versions before this one: the recipe in the folder is all there is."""
    folder = Path(run["out"])
    without_facts(folder, "run", "settings")
    status = status_of(folder)
    del status["recipe_checksum"]
    (folder / "run.json").write_text(json.dumps(status))
    said = stage.finish(run, command="resume")
    assert goes_on_from(said) == 30
    assert_same_end(folder, stage.whole())


def test_a_damaged_recipe_and_no_settings_anywhere(run, caplog):
    """It is said that the file is not the one that was written; without any state the run is not begun with it."""
    caplog.set_level("INFO", logger="trimtab")
    folder = Path(run["out"])
    cut_after_the_data(folder / "recipe.yaml")
    without_facts(folder, "settings")
    load_settings(folder, None, [])
    assert "recipe.yaml was changed since the run wrote it" in caplog.text
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(RecipeError, match="there is no checkpoint yet"):
        load_settings(folder, None, [])


def test_small_files_are_on_the_disk_before_they_take_their_names(tmp_path, monkeypatch):
    """A power cut after a rename would else leave an empty file under the name of a good one."""
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
