"""The best model of a run, damaged on the disk: a resumed run notices, and writes it again or says that it is gone."""

import json
import shutil
import time
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_same_tensors, assert_went_on, status_of
from safetensors.torch import load_file

from trimtab.checkpoint.export import weight_checksums, why_damaged
from trimtab.checkpoint.store import MANIFEST, _signed
from trimtab.runs.run_folder import RunFolder

# This metric never changes: the first model stays the best. In one of the runs a state is saved after its step.
FIRST_IS_BEST = {
    "saved": {"evaluate": {"every": "5 steps", "metric": "length"}},
    "not saved": {"evaluate": {"every": "8 steps", "metric": "length"}},
}


def cut(best):
    content = (best / "model.safetensors").read_bytes()
    (best / "model.safetensors").write_bytes(content[: len(content) // 2])


def flip(best):
    content = bytearray((best / "model.safetensors").read_bytes())
    content[-20] ^= 1
    (best / "model.safetensors").write_bytes(content)


DAMAGES = {
    "cut": cut,
    "flipped": flip,
    "without weights": lambda best: (best / "model.safetensors").unlink(),
    "missing": shutil.rmtree,
}


@pytest.fixture(scope="module")
def stopped(stage):
    """Runs that were stopped after step 30, whose best model is older than their newest state."""
    recipes = {name: stage.recipe(**changes) for name, changes in FIRST_IS_BEST.items()}
    for recipe in recipes.values():
        assert stage.train(recipe, at={"30": "signal SIGTERM"}).wait() == 75
        assert status_of(recipe["out"])["best_files"]["step"] == status_of(recipe["out"])["best_step"]
    return recipes


def copy_of(stage, stopped, name):
    recipe = stage.recipe(**FIRST_IS_BEST[name])
    shutil.copytree(stopped[name]["out"], recipe["out"])
    return recipe, Path(recipe["out"])


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[] if name in ("cut", "flipped") else pytest.mark.slow) for name in DAMAGES]
)
def test_written_again_from_the_state_of_its_step(stage, stopped, damage):
    """And the run ends as if nothing had been: the state was only looked at."""
    recipe, run = copy_of(stage, stopped, "saved")
    assert status_of(run)["best_step"] == 5
    DAMAGES[damage](run / "best")
    said = stage.finish(recipe, command="resume")
    assert "it was written again from step-5" in said
    assert assert_went_on(run, said) == 30
    assert_same_end(run, stage.whole("saved", **FIRST_IS_BEST["saved"]))


def test_gone(stage, stopped):
    """No state has its weights: that is said, and the best one is sought among the models that follow."""
    recipe, run = copy_of(stage, stopped, "not saved")
    assert status_of(run)["best_step"] == 8
    cut(run / "best")
    said = stage.finish(recipe, command="resume")
    assert "the best model, of step 8, is lost: " in said
    assert "model.safetensors is damaged" in said
    assert (run / "best-damaged-step-8").is_dir()
    assert status_of(run)["best_step"] == json.loads((run / "best" / "trimtab.json").read_text())["step"] == 32
    assert why_damaged(run / "best") == ""
    whole = stage.whole("not saved", **FIRST_IS_BEST["not saved"])
    for name in ("model", "optimizer", "random"):
        tensors = [load_file(folder / "checkpoints" / "step-40" / f"{name}.safetensors") for folder in (run, whole)]
        assert_same_tensors(*tensors, name)


@pytest.mark.slow
def test_gone_when_all_is_done(stage):
    recipe = stage.recipe(**FIRST_IS_BEST["not saved"])
    run = Path(recipe["out"])
    shutil.copytree(stage.whole("not saved", **FIRST_IS_BEST["not saved"]), run)
    shutil.rmtree(run / "best")
    said = stage.finish(recipe, command="resume")
    assert "the best model, of step 8, is lost: " in said
    assert "no evaluation followed the loss of the best model: the last model is kept as the best one" in said
    assert why_damaged(run / "best") == ""


@pytest.mark.slow
def test_without_checksums_a_cut_is_still_found(stage, stopped):
    """As of versions that did not keep them."""
    recipe, run = copy_of(stage, stopped, "saved")
    status = status_of(run)
    del status["best_files"]
    (run / "run.json").write_text(json.dumps(status))
    for path in run.glob(f"checkpoints/*/{MANIFEST}"):
        manifest = json.loads(path.read_text())
        del manifest["checksum"], manifest["facts"]["run"]
        path.write_bytes(_signed(manifest))
    cut(run / "best")
    assert "it was written again from step-5" in stage.finish(recipe, command="resume")
    assert_same_end(run, stage.whole("saved", **FIRST_IS_BEST["saved"]))


@pytest.mark.slow
def test_a_whole_one_is_left_alone(stage, stopped):
    recipe, run = copy_of(stage, stopped, "not saved")
    (run / "best" / "notes.txt").write_text("mine")
    said = stage.finish(recipe, command="resume")
    assert "best model" not in said
    assert (run / "best" / "notes.txt").read_text() == "mine"


def test_checksums_are_noted_while_the_run_goes_on(tmp_path, monkeypatch):
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


def test_what_counts_as_damaged(tmp_path, tiny):
    folder = tmp_path / "model"
    shutil.copytree(tiny.folder("bert"), folder)
    known = weight_checksums(folder)
    assert why_damaged(folder) == why_damaged(folder, known) == ""
    flip(folder)
    assert why_damaged(folder) == ""
    assert "its checksum does not match" in why_damaged(folder, known)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert why_damaged(folder).endswith("model-00002-of-00002.safetensors is missing")
    assert why_damaged(tmp_path / "nothing").endswith("nothing is missing")
