"""A mirror on a drive that others can write to: what is in it never decides where files are written or read from."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from fault_stage import assert_same_end, assert_went_on, saved_steps, status_of


@pytest.fixture
def lost(stage, tmp_path):
    """The recipe of a run that was killed after step 23 and is lost, and its mirror."""
    drive = tmp_path / "drive"
    recipe = stage.recipe(checkpoint={"mirror": str(drive)})
    mirror = Path(drive, *Path(recipe["out"]).parts[-2:])
    child = stage.train(recipe, at={"23": "sleep 60"})
    child.wait_until(lambda: saved_steps(mirror) == [15, 20])
    child.kill()
    assert child.wait() == -signal.SIGKILL
    shutil.rmtree(recipe["out"])
    Path(f"{recipe['out']}.steps").unlink()
    return recipe, mirror


def resume(stage, mirror, tmp_path, **arguments):
    """As `trimtab resume MIRROR` in an empty folder; gives the process and that folder."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    notes = str(tmp_path / "notes")
    child = stage.start("train", recipe={"out": str(mirror)}, command="resume", notes=notes, cwd=work, **arguments)
    return child, work


def test_the_recorded_folder_is_not_written_to(stage, lost, tmp_path):
    recipe, mirror = lost
    elsewhere = tmp_path / "elsewhere"
    status = status_of(mirror)
    (mirror / "run.json").write_text(json.dumps(status | {"path": str(elsewhere / "run")}))
    settings = yaml.safe_load((mirror / "recipe.yaml").read_text())
    settings["out"], settings["checkpoint"]["mirror"] = str(elsewhere / "out"), str(elsewhere / "mirror")
    (mirror / "recipe.yaml").write_text(yaml.safe_dump(settings))
    child, work = resume(stage, mirror, tmp_path)
    assert child.wait() == 0, child.said
    assert not elsewhere.exists()
    run = work / "runs" / mirror.parent.name / mirror.name
    assert (
        f"was copied to {run.relative_to(work)}; before it was in {elsewhere / 'run'} (--out {elsewhere / 'run'})"
        in child.said
    )
    assert assert_went_on(tmp_path / "notes", child.said) == 20
    assert saved_steps(mirror) == saved_steps(run) == [35, 40]  # it keeps the mirror that was named
    assert status_of(mirror)["path"] == str(run.relative_to(work))
    (run / ".mirror.json").unlink()
    assert_same_end(run, stage.whole())
    assert not Path(recipe["out"]).exists()


@pytest.mark.slow
def test_a_mirror_is_no_place_to_go_on(stage, lost, tmp_path):
    _, mirror = lost
    child, _ = resume(stage, mirror, tmp_path, options={"out": str(mirror)})
    assert child.wait() == 2
    assert "is a mirror and cannot be resumed in place" in child.said
    assert saved_steps(mirror) == [15, 20]


def test_a_checkpoint_with_a_link_is_left_out_and_stays_so(stage, lost, tmp_path):
    """Its copy would be valid: then the state that was just passed over would be used."""
    _, mirror = lost
    file = mirror / "checkpoints" / "step-20" / "model.safetensors"
    file.rename(tmp_path / "outside.safetensors")
    file.symlink_to(tmp_path / "outside.safetensors")
    run = tmp_path / "run"
    child, _ = resume(stage, mirror, tmp_path, options={"out": str(run)})
    assert child.wait() == 0, child.said
    assert f"{file.parent} is left out: {file} is a link" in child.said
    assert assert_went_on(tmp_path / "notes", child.said) == 15


@pytest.mark.slow
def test_a_hard_link_is_the_file_itself(stage, lost, tmp_path):
    """It is verified and copied as any other; nothing is ever written through it."""
    _, mirror = lost
    outside = tmp_path / "metrics.jsonl"
    os.link(mirror / "metrics.jsonl", outside)
    before = outside.read_bytes()
    child, _ = resume(stage, mirror, tmp_path, options={"out": str(tmp_path / "run")})
    assert child.wait() == 0, child.said
    assert assert_went_on(tmp_path / "notes", child.said) == 20
    assert outside.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recipe.yaml", "best/config.json", "checkpoints"])
def test_other_links_are_refused(stage, lost, tmp_path, name):
    _, mirror = lost
    (mirror / name).rename(tmp_path / "moved")
    (mirror / name).symlink_to(tmp_path / "moved")
    run = tmp_path / "run"
    child, _ = resume(stage, mirror, tmp_path, options={"out": str(run)})
    assert child.wait() == 2
    assert f"{mirror / name} is a link, perhaps to the outside of the mirror" in child.said
    assert not (run / "run.json").exists()


@pytest.mark.slow
def test_links_that_wait_in_a_mirror_are_not_written_through(stage, tmp_path):
    """Under the names that files have while they are copied."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    recipe = stage.recipe(checkpoint={"mirror": str(tmp_path / "drive")})
    mirror = Path(tmp_path / "drive", *Path(recipe["out"]).parts[-2:])
    mirror.mkdir(parents=True)
    for name in (".mirror.json.writing", ".metrics.jsonl.mirrored", ".run.json.mirrored"):
        (mirror / name).symlink_to(victim)
    stage.finish(recipe)
    assert victim.read_text() == "precious"
    assert saved_steps(mirror) == [35, 40]
