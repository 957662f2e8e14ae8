"""A machine that is gone with its disk: the run comes back from its mirror, elsewhere, and ends with the same bits."""

import shutil
import signal
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, goes_on_from, saved_steps, status_of


def with_mirror(stage, tmp_path):
    """A recipe, and where its mirror will be."""
    recipe = stage.recipe(checkpoint={"mirror": str(tmp_path / "drive")})
    return recipe, mirror_of(tmp_path / "drive", recipe["out"])


def mirror_of(drive, run):
    return Path(drive, *Path(run).parts[-2:])


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
    child.wait()
    lose(recipe)
    return recipe, mirror


def resume(stage, mirror, notes, **arguments):
    return stage.train({"out": str(mirror)}, command="resume", notes=str(notes), **arguments)


def assert_comes_back(stage, mirror, run, **options):
    """From its mirror to `run`, and to its end; gives the step it went on from."""
    child = resume(stage, mirror, run, options={"out": str(run), **options})
    assert child.wait() == 0, child.said
    assert f"{mirror} was copied to {run}" in child.said
    step = assert_went_on(run, child.said)
    (Path(run) / ".mirror.json").unlink()
    assert_same_end(run, stage.whole())
    return step


def test_a_run_comes_back_in_another_place(stage, lost, tmp_path):
    _, mirror = lost
    new = tmp_path / "new-machine" / "run"
    new.parent.mkdir()
    assert assert_comes_back(stage, mirror, new, out=str(new)) == 20
    assert status_of(new)["path"] == str(new)
    assert saved_steps(mirror) == saved_steps(new) == [35, 40]  # it goes on with the mirror that it had
    model = Path("best", "model.safetensors")
    assert (mirror / model).read_bytes() == (new / model).read_bytes()


@pytest.mark.slow
def test_killed_while_it_is_copied_back(stage, lost):
    """The same command does it again."""
    recipe, mirror = lost
    kill = {"event": "os.rename", "path": "best.writing", "nth": 1}
    child = resume(stage, mirror, recipe["out"], kill=kill, options={"out": recipe["out"]})
    assert child.wait() == -signal.SIGKILL
    assert assert_comes_back(stage, mirror, recipe["out"]) == 20
    assert saved_steps(mirror) == [35, 40]


@pytest.mark.slow
def test_it_is_not_copied_over_a_run_that_is_there(stage, lost):
    recipe, mirror = lost
    shutil.copytree(stage.whole(), recipe["out"])
    child = resume(stage, mirror, recipe["out"], options={"out": recipe["out"]})
    assert child.wait() == 2
    assert f"{recipe['out']} is not empty" in child.said
    assert_same_end(recipe["out"], stage.whole())


IN_THE_MIDDLE = {
    "before the numbers": {"event": "open", "path": ".metrics.jsonl.mirrored", "nth": 2},
    "before the best model": {"event": "os.mkdir", "path": "drive/{}/.best.writing", "nth": 2},
    **{f"at random, {nth}": {"path": "drive/{}", "nth": nth} for nth in range(80, 260, 40)},
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", IN_THE_MIDDLE)
def test_lost_while_it_was_copied(stage, tmp_path, moment):
    """Whichever file was just being copied: numbers and best model are never older than the state that needs them."""
    recipe, mirror = with_mirror(stage, tmp_path)
    kill = IN_THE_MIDDLE[moment]
    kill = kill | {"path": kill["path"].format("/".join(mirror.parts[-2:]))}
    child = stage.train(recipe, kill=kill, at={"7": f"there {mirror}/checkpoints/step-5"})
    assert child.wait() == -signal.SIGKILL, child.said
    saved = saved_steps(mirror)
    assert saved
    lose(recipe)
    assert assert_comes_back(stage, mirror, recipe["out"]) == saved[-1]


@pytest.mark.slow
def test_a_drive_that_was_never_there_costs_nothing(stage, tmp_path):
    (tmp_path / "drive").write_text("this is not a folder")
    recipe, _ = with_mirror(stage, tmp_path)
    said = stage.finish(recipe)
    assert said.count("is not up to date") == 1
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_two_processes_come_back_together(stage, lost):
    """One of them copies, the other one waits for it."""
    recipe, mirror = lost
    options = {"command": "resume", "options": {"out": recipe["out"]}}
    of_rank = {rank: {**options, "notes": f"{recipe['out']}.rank-{rank}"} for rank in range(2)}
    said = stage.finish_together({"out": str(mirror)}, of_rank)
    assert goes_on_from(said) == 20
    assert said.count(f"{mirror} was copied to") == 1
    assert status_of(recipe["out"])["state"] == "finished"
    assert saved_steps(recipe["out"]) == saved_steps(mirror) == [35, 40]
