"""Checkpoints that were damaged on the disk: each is named with what is wrong, and the run goes on from one before."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, saved_steps, status_of


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut_off(path):
    path.write_bytes(path.read_bytes()[:-7])


def leave_the_folder(checkpoint):
    manifest = json.loads((checkpoint / "trimtab.json").read_text())
    manifest["files"]["../../recipe.yaml"] = {"bytes": 1, "checksum": "crc32:00000000"}
    (checkpoint / "trimtab.json").write_text(json.dumps(manifest))


# what happens to a checkpoint, and words of the line that tells of it
DAMAGES = {
    "a bit of a tensor": (lambda folder: flip_a_bit(folder / "optimizer.safetensors"), "optimizer.safetensors"),
    "a bit of the manifest": (lambda folder: flip_a_bit(folder / "trimtab.json"), "trimtab.json"),
    "the end of a file": (lambda folder: cut_off(folder / "model.safetensors"), "model.safetensors is damaged"),
    "a file is missing": (
        lambda folder: (folder / "optimizer.safetensors").unlink(),
        "optimizer.safetensors is missing",
    ),
    "no manifest": (lambda folder: (folder / "trimtab.json").unlink(), "is not a trimtab checkpoint"),
    "garbage for a manifest": (
        lambda folder: (folder / "trimtab.json").write_text('{"format": 2, "fi'),
        "trimtab.json",
    ),
    "an empty folder": (lambda folder: [file.unlink() for file in folder.iterdir()], "it is empty"),
    "a pickle": (lambda folder: (folder / "rng.pkl").write_bytes(pickle.dumps({})), "rng.pkl (a pickle, by its extension)"),
    "a path that leaves the folder": (leave_the_folder, "trimtab.json is damaged"),
}


@pytest.fixture(scope="module")
def killed(stage):
    """A run that saved after every step and was killed after step 14."""
    recipe = stage.recipe(checkpoint={"every": "1 steps", "keep": 50})
    assert stage.train(recipe, at={"14": "die"}).wait() == -9
    return recipe


def copy_of(stage, killed):
    recipe = stage.recipe(checkpoint=killed["checkpoint"])
    shutil.copytree(killed["out"], recipe["out"])
    return recipe


def checkpoints_from_the_newest(recipe):
    return [Path(recipe["out"]) / "checkpoints" / f"step-{step}" for step in reversed(saved_steps(recipe["out"]))]


@pytest.mark.slow
def test_everything_that_can_be_wrong_at_once(stage, killed):
    """Each of the newest checkpoints has a damage of its own: only if all are found does the run go on before them."""
    recipe = copy_of(stage, killed)
    newest = checkpoints_from_the_newest(recipe)[: len(DAMAGES)]
    damaged = dict(zip(newest, (words for _, words in DAMAGES.values()), strict=True))
    for folder, (damage, _) in zip(newest, DAMAGES.values(), strict=True):
        damage(folder)
    oldest = int(newest[-1].name.removeprefix("step-"))
    assert oldest > 1
    said = stage.finish(recipe)
    assert assert_went_on(recipe["out"], said) == oldest - 1
    assert "saving a checkpoint failed" not in said  # what is damaged is in nobody's way
    for folder, words in damaged.items():
        (told,) = [line for line in said.splitlines() if f"skipping {folder.name}: " in line]
        assert words in told
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_all_of_them_damaged(stage, killed):
    """To begin anew would throw away what could perhaps be mended: that is left to the user. `fresh` does it."""
    recipe = copy_of(stage, killed)
    for folder in checkpoints_from_the_newest(recipe):
        (folder / "trimtab.json").unlink()
    child = stage.train(recipe)
    assert child.wait() == 2
    num_saved = len(saved_steps(killed["out"]))
    assert child.said.count("skipping step-") == num_saved
    assert f"none of the {num_saved} checkpoints" in child.said
    assert "--fresh" in child.said
    assert saved_steps(recipe["out"]) == saved_steps(killed["out"])
    said = stage.finish(recipe, resume=False, fresh=True)
    assert "saving a checkpoint failed" not in said
    assert_same_end(recipe["out"], stage.whole())


def test_a_damaged_one_that_was_asked_for(stage, killed):
    """It is refused, and nothing of the run has changed."""
    recipe = copy_of(stage, killed)
    newest = checkpoints_from_the_newest(recipe)[0]
    flip_a_bit(newest / "optimizer.safetensors")
    child = stage.train(recipe, command="resume", options={"from_step": newest.name})
    assert child.wait() == 2
    assert "optimizer.safetensors is damaged" in child.said
    assert saved_steps(recipe["out"]) == saved_steps(killed["out"])
    assert status_of(recipe["out"]) == status_of(killed["out"])
