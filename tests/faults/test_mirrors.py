"""A machine that is lost with its disk: the run is restored from its mirror elsewhere, and ends with the same bits.

The mirror may be on a drive that others can write to: its content never decides where files are written or read.
"""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from fault_stage import assert_same_end, assert_went_on, goes_on_from, saved_steps, status_of


def with_mirror(stage, tmp_path):
    """A recipe, and where its mirror will be."""
    recipe = stage.recipe(checkpoint={"mirror": str(tmp_path / "drive")})
    return recipe, Path(tmp_path / "drive", *Path(recipe["out"]).parts[-2:])


def lose(recipe):
    """The machine and its disk are gone."""
    shutil.rmtree(recipe["out"])
    Path(f"{recipe['out']}.steps").unlink()


@pytest.fixture
def lost(stage, tmp_path):
    """The recipe of a run that is lost, and its mirror, up to step 20."""
    recipe, mirror = with_mirror(stage, tmp_path)
    child = stage.train(recipe, at={"23": "sleep 60"})
    child.wait_until(lambda: saved_steps(mirror) == [15, 20])
    child.kill()
    assert child.wait() == -signal.SIGKILL
    lose(recipe)
    return recipe, mirror


def resume(stage, mirror, tmp_path, out=None, **arguments):
    """Start `trimtab resume MIRROR` in an empty folder, with --out if it is given."""
    (tmp_path / "work").mkdir(exist_ok=True)
    options = {} if out is None else {"out": str(out)}
    arguments = {"command": "resume", "options": options, "notes": str(tmp_path / "notes"), **arguments}
    return stage.start("train", recipe={"out": str(mirror)}, cwd=tmp_path / "work", **arguments)


def assert_comes_back(stage, mirror, tmp_path, run):
    """From its mirror to `run`, and to its end; gives the step it resumed from."""
    child = resume(stage, mirror, tmp_path, run)
    assert child.wait() == 0, child.said
    assert f"{mirror} was copied to {run}" in child.said
    step = assert_went_on(tmp_path / "notes", child.said)
    (Path(run) / ".mirror.json").unlink()
    assert_same_end(run, stage.whole())
    return step


@pytest.mark.slow
def test_a_run_comes_back_in_another_place(stage, lost, tmp_path):
    _, mirror = lost
    new = tmp_path / "new-machine" / "run"
    new.parent.mkdir()
    assert assert_comes_back(stage, mirror, tmp_path, new) == 20
    assert status_of(new)["path"] == str(new)
    assert saved_steps(mirror) == saved_steps(new) == [35, 40]  # it keeps the mirror that it had
    model = Path("best", "model.safetensors")
    assert (mirror / model).read_bytes() == (new / model).read_bytes()


@pytest.mark.slow
def test_killed_while_it_is_copied_back(stage, lost, tmp_path):
    """The same command does it again."""
    recipe, mirror = lost
    kill = {"event": "os.rename", "path": "best.writing", "nth": 1}
    assert resume(stage, mirror, tmp_path, recipe["out"], kill=kill).wait() == -signal.SIGKILL
    assert assert_comes_back(stage, mirror, tmp_path, recipe["out"]) == 20
    assert saved_steps(mirror) == [35, 40]


@pytest.mark.slow
def test_where_a_run_is_not_restored_to(stage, lost, tmp_path):
    """Neither over another run, nor into the mirror itself."""
    recipe, mirror = lost
    shutil.copytree(stage.whole(), recipe["out"])
    for out, words in (
        (recipe["out"], f"{recipe['out']} is not empty"),
        (mirror, "is a mirror and cannot be resumed in place"),
    ):
        child = resume(stage, mirror, tmp_path, out)
        assert child.wait() == 2
        assert words in child.said
    assert_same_end(recipe["out"], stage.whole())
    assert saved_steps(mirror) == [15, 20]


IN_THE_MIDDLE = {
    "before the metrics": {"event": "open", "path": ".metrics.jsonl.mirrored", "nth": 2},
    "before the best model": {"event": "os.mkdir", "path": "drive/{}/.best.writing", "nth": 2},
    **{f"at random, {nth}": {"path": "drive/{}", "nth": nth} for nth in range(80, 260, 40)},
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", IN_THE_MIDDLE)
def test_lost_while_it_was_copied(stage, tmp_path, moment):
    """Whichever file was being copied: metrics and best model are never older than the checkpoint that needs them."""
    recipe, mirror = with_mirror(stage, tmp_path)
    kill = IN_THE_MIDDLE[moment]
    kill = kill | {"path": kill["path"].format("/".join(mirror.parts[-2:]))}
    child = stage.train(recipe, kill=kill, at={"7": f"there {mirror}/checkpoints/step-5"})
    assert child.wait() == -signal.SIGKILL, child.said
    saved = saved_steps(mirror)
    assert saved
    lose(recipe)
    assert assert_comes_back(stage, mirror, tmp_path, recipe["out"]) == saved[-1]


@pytest.mark.slow
def test_a_drive_that_was_never_there_costs_nothing(stage, tmp_path):
    (tmp_path / "drive").write_text("this is not a folder")
    recipe, _ = with_mirror(stage, tmp_path)
    recipe["checkpoint"]["mirror"] = str(tmp_path / "drive" / "backups")
    said = stage.finish(recipe)
    assert said.count("is not up to date") == 1
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_two_processes_come_back_together(stage, lost):
    """One of them copies, the other waits for it."""
    recipe, mirror = lost
    options = {"command": "resume", "options": {"out": recipe["out"]}}
    of_rank = {rank: {**options, "notes": f"{recipe['out']}.rank-{rank}"} for rank in range(2)}
    said = stage.finish_together({"out": str(mirror)}, of_rank)
    assert goes_on_from(said) == 20
    assert said.count(f"{mirror} was copied to") == 1
    assert status_of(recipe["out"])["state"] == "finished"
    assert saved_steps(recipe["out"]) == saved_steps(mirror) == [35, 40]


# ---------------------------------------------------------------------- a mirror that others can write to


@pytest.mark.slow
def test_the_recorded_folder_is_not_written_to(stage, lost, tmp_path):
    recipe, mirror = lost
    elsewhere = tmp_path / "elsewhere"
    status = status_of(mirror)
    (mirror / "run.json").write_text(json.dumps(status | {"path": str(elsewhere / "run")}))
    settings = yaml.safe_load((mirror / "recipe.yaml").read_text())
    settings["out"], settings["checkpoint"]["mirror"] = str(elsewhere / "out"), str(elsewhere / "mirror")
    (mirror / "recipe.yaml").write_text(yaml.safe_dump(settings))
    child = resume(stage, mirror, tmp_path)
    assert child.wait() == 0, child.said
    assert not elsewhere.exists()
    run = Path("runs", mirror.parent.name, mirror.name)
    assert f"was copied to {run}; its original folder was {elsewhere / 'run'} (--out" in child.said
    assert assert_went_on(tmp_path / "notes", child.said) == 20
    assert status_of(mirror)["path"] == str(run)
    run = tmp_path / "work" / run
    assert saved_steps(mirror) == saved_steps(run) == [35, 40]  # it keeps the mirror that was named
    (run / ".mirror.json").unlink()
    assert_same_end(run, stage.whole())
    assert not Path(recipe["out"]).exists()


@pytest.mark.slow
def test_a_checkpoint_with_a_link_is_not_restored(stage, lost, tmp_path):
    """Its copy would be valid, and the run would resume from it after all."""
    _, mirror = lost
    file = mirror / "checkpoints" / "step-20" / "model.safetensors"
    file.rename(tmp_path / "outside.safetensors")
    file.symlink_to(tmp_path / "outside.safetensors")
    child = resume(stage, mirror, tmp_path, tmp_path / "run")
    assert child.wait() == 0, child.said
    assert f"{file.parent} is not restored: {file} is a symbolic link" in child.said
    assert assert_went_on(tmp_path / "notes", child.said) == 15


@pytest.mark.slow
def test_a_hard_link_is_the_file_itself(stage, lost, tmp_path):
    """It is verified and copied as any other; nothing is ever written through it."""
    _, mirror = lost
    outside = tmp_path / "metrics.jsonl"
    os.link(mirror / "metrics.jsonl", outside)
    before = outside.read_bytes()
    child = resume(stage, mirror, tmp_path, tmp_path / "run")
    assert child.wait() == 0, child.said
    assert assert_went_on(tmp_path / "notes", child.said) == 20
    assert outside.read_bytes() == before


@pytest.mark.slow
def test_other_links_are_refused(stage, lost, tmp_path):
    _, mirror = lost
    run = tmp_path / "run"
    for name in ("recipe.yaml", "best/config.json", "checkpoints"):
        (mirror / name).rename(tmp_path / "moved")
        (mirror / name).symlink_to(tmp_path / "moved")
        child = resume(stage, mirror, tmp_path, run)
        assert child.wait() == 2
        assert f"{mirror / name} is a symbolic link, which may point outside the mirror" in child.said
        assert not (run / "run.json").exists()
        (mirror / name).unlink()
        (tmp_path / "moved").rename(mirror / name)


@pytest.mark.slow
def test_links_that_wait_in_a_mirror_are_not_written_through(stage, tmp_path):
    """Under the names that files have while they are copied."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    recipe, mirror = with_mirror(stage, tmp_path)
    mirror.mkdir(parents=True)
    for name in (".mirror.json.writing", ".metrics.jsonl.mirrored", ".run.json.mirrored"):
        (mirror / name).symlink_to(victim)
    stage.finish(recipe)
    assert victim.read_text() == "precious"
    assert saved_steps(mirror) == [35, 40]
