"""Checkpoints that were damaged on the disk: each is named with what is wrong, and the run goes on from one before."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, saved_steps, status_of

FILES = (
    *("model.safetensors", "optimizer.safetensors", "random.safetensors", "loader.safetensors", "object.safetensors"),
    *("state.json", "trimtab.json"),
)


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
    **{f"a bit of {name}": (lambda folder, name=name: flip_a_bit(folder / name), name) for name in FILES},
    **{f"the end of {name}": (lambda folder, name=name: cut_off(folder / name), name) for name in FILES},
    "a file is missing": (
        lambda folder: (folder / "optimizer.safetensors").unlink(),
        "optimizer.safetensors is missing",
    ),
    "no manifest": (lambda folder: (folder / "trimtab.json").unlink(), "is no checkpoint of trimtab"),
    "garbage for a manifest": (
        lambda folder: (folder / "trimtab.json").write_text('{"format": 2, "fi'),
        "trimtab.json",
    ),
    "garbage for a state": (lambda folder: (folder / "state.json").write_text("[]"), "state.json was cut off"),
    "an empty file": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "model.safetensors was cut off"),
    "an empty folder": (lambda folder: [file.unlink() for file in folder.iterdir()], "it is empty"),
    "a pickle": (lambda folder: (folder / "rng.pkl").write_bytes(pickle.dumps({})), "rng.pkl, a pickle by its name"),
    "a path that leaves the folder": (leave_the_folder, "trimtab.json was changed"),
}


@pytest.fixture(scope="module")
def killed(stage):
    """A run that saved after every step and was killed after step 30."""
    recipe = stage.recipe(checkpoint={"every": "1 steps", "keep": 50})
    assert stage.train(recipe, at={"30": "die"}).wait() == -9
    return recipe


def copy_of(stage, killed):
    recipe = stage.recipe(checkpoint=killed["checkpoint"])
    shutil.copytree(killed["out"], recipe["out"])
    return recipe


def checkpoints_from_the_newest(recipe):
    return [Path(recipe["out"]) / "checkpoints" / f"step-{step}" for step in reversed(saved_steps(recipe["out"]))]


def can_have(name, folder):
    """Whether a damage is possible there: what has no tensors at a step has no file of tensors."""
    return all((folder / file).exists() for file in FILES if file in name)


def test_everything_that_can_be_wrong_at_once(stage, killed):
    """Each of the newest checkpoints has a damage of its own: only if all are found does the run go on before them."""
    recipe = copy_of(stage, killed)
    left, damaged = list(DAMAGES), {}
    for folder in checkpoints_from_the_newest(recipe):
        if left:
            name = next(name for name in left if can_have(name, folder))
            left.remove(name)
            DAMAGES[name][0](folder)
            damaged[folder] = DAMAGES[name][1]
    oldest = min(int(folder.name.removeprefix("step-")) for folder in damaged)
    assert not left
    assert oldest > 1
    said = stage.finish(recipe)
    assert assert_went_on(recipe["out"], said) == oldest - 1
    assert "a save failed" not in said  # what is damaged is in nobody's way
    for folder, words in damaged.items():
        (told,) = [line for line in said.splitlines() if f"{folder.name} is passed over" in line]
        assert words in told
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_alone(stage, killed, name):
    recipe = copy_of(stage, killed)
    for newest in checkpoints_from_the_newest(recipe):
        if can_have(name, newest):
            break
        shutil.rmtree(newest)
    DAMAGES[name][0](newest)
    said = stage.finish(recipe)
    assert assert_went_on(recipe["out"], said) == int(newest.name.removeprefix("step-")) - 1
    assert_same_end(recipe["out"], stage.whole())


def test_all_of_them_damaged(stage, killed):
    """To begin anew would throw away what could perhaps be mended: that is left to the user. `fresh` does it."""
    recipe = copy_of(stage, killed)
    for folder in checkpoints_from_the_newest(recipe):
        (folder / "trimtab.json").unlink()
    child = stage.train(recipe)
    assert child.wait() == 2
    num_saved = len(saved_steps(killed["out"]))
    assert child.said.count("is passed over") == num_saved
    assert f"none of the {num_saved} checkpoints" in child.said
    assert "--fresh" in child.said
    assert saved_steps(recipe["out"]) == saved_steps(killed["out"])
    said = stage.finish(recipe, resume=False, fresh=True)
    assert "a save failed" not in said
    assert_same_end(recipe["out"], stage.whole())


def test_a_damaged_one_that_was_asked_for(stage, killed):
    """It is refused, and nothing of the run has changed."""
    recipe = copy_of(stage, killed)
    newest = checkpoints_from_the_newest(recipe)[0]
    flip_a_bit(newest / "optimizer.safetensors")
    child = stage.train(recipe, command="resume", options={"from_step": newest.name})
    assert child.wait() == 2
    assert "optimizer.safetensors was changed" in child.said
    assert saved_steps(recipe["out"]) == saved_steps(killed["out"])
    assert status_of(recipe["out"]) == status_of(killed["out"])
