"""A disk that is full, a folder that may not be written, a folder that somebody else is using."""

import os
import signal
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, goes_on_from, notes_of, saved_steps, status_of

from small_disk import mounted

TOO_LITTLE = 100_000  # bytes of a file: less than the optimizer's state, more than anything else


@pytest.mark.parametrize(
    ("begins", "ends", "words"),
    [
        (f"limit {TOO_LITTLE}", "limit -1", ["File too large", "make room on that disk"]),
        pytest.param("chmod 555 {}", "chmod 755 {}", ["Permission denied"], marks=pytest.mark.slow),
    ],
    ids=["no room", "read-only"],
)
def test_nothing_can_be_saved_for_a_while(stage, begins, ends, words):
    """Saves fail and say so, the training goes on, and what a later save makes good is no failure of the run."""
    recipe = stage.recipe()
    folder = Path(recipe["out"]) / "checkpoints"
    at = {"12": f"saved 10; {begins.format(folder)}", "32": ends.format(folder)}
    said = stage.finish(recipe, nobody_special=True, at=at)
    failed = [line for line in said.splitlines() if "a save failed, and the training goes on" in line]
    assert len(failed) == 4  # steps 15, 20, 25 and 30
    assert all(word in line for word in words for line in failed)
    assert notes_of(recipe["out"])["fit"]["save_failure"] is None
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_no_room_until_the_end(stage):
    """The model is there, the last state is not, and the result says so; what was saved before is whole."""
    recipe = stage.recipe()
    stage.finish(recipe, at={"12": f"saved 10; limit {TOO_LITTLE}"})
    assert "File too large" in notes_of(recipe["out"])["fit"]["save_failure"]
    assert saved_steps(recipe["out"]) == [5, 10]
    assert not list((Path(recipe["out"]) / "checkpoints").glob(".*"))
    whole = stage.whole()
    model = Path("best", "model.safetensors")
    assert (Path(recipe["out"]) / model).read_bytes() == (whole / model).read_bytes()
    said = stage.finish(recipe, command="resume")
    assert assert_went_on(recipe["out"], said) == 10
    assert_same_end(recipe["out"], whole)


@pytest.mark.slow
def test_killed_when_there_is_room_again(stage):
    """After a state was saved, and before the next numbers are written: those that have waited are not lost."""
    recipe = stage.recipe()
    at = {"12": "saved 10; full", "19": "limit -1", "21": "saved 20; die"}
    assert stage.train(recipe, at=at).wait() == -signal.SIGKILL
    said = stage.finish(recipe)
    assert assert_went_on(recipe["out"], said) == 20
    assert_same_end(recipe["out"], stage.whole())


@pytest.fixture
def small_disk(tmp_path):
    with mounted(tmp_path / "disk", "3m") as place:
        yield place


def test_a_disk_that_is_really_full(stage, small_disk):
    """Not a byte is left from step 12 to 27: no state, no status, no numbers, no best model can be written."""
    recipe = stage.recipe(out=small_disk / "run")
    said = stage.finish(recipe, at={"12": f"saved 10; fill {small_disk}", "27": f"remove {small_disk}/filler"})
    assert f"the model could not be written to {recipe['out']}/best: No space left on device" in said
    assert "step-15 could not be written: No space left on device" in said
    assert "step 20 is not saved, because the best model could not be written" in said
    assert f"the model that waited is in {recipe['out']}/best now" in said
    assert notes_of(recipe["out"])["fit"]["save_failure"] is None
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_full_until_the_end(stage, small_disk):
    """The result says that the model is not there; made room for, the run goes on and has it."""
    recipe = stage.recipe(out=small_disk / "run")
    notes = str(stage.folder / "full-until-the-end")
    said = stage.finish(recipe, at={"12": f"saved 10; fill {small_disk}"}, notes=notes)
    assert "lines of numbers are lost" in said
    failure = notes_of(notes)["fit"]["save_failure"]
    assert f"the model could not be written to {recipe['out']}/best: No space left on device" in failure
    (small_disk / "filler").unlink()
    said = stage.finish(recipe)
    assert goes_on_from(said) == 10
    assert_same_end(recipe["out"], stage.whole())


@pytest.fixture
def killed(stage):
    """A run that was killed after step 23, so that it can go on from step 20."""
    recipe = stage.recipe()
    assert stage.train(recipe, at={"23": "die"}).wait() == -signal.SIGKILL
    return recipe


@pytest.fixture
def locked_away():
    """Makes folders read-only, and gives them back as they were."""
    folders = []

    def lock(folder):
        folders.append(folder)
        folder.chmod(0o555)

    yield lock
    for folder in folders:
        folder.chmod(0o755)


def content_of(folder):
    return {path: path.stat().st_mtime_ns for path in Path(folder).rglob("*")}


@pytest.mark.slow
def test_a_folder_that_may_not_be_written(stage, killed, locked_away):
    """One message and exit code 2, and nothing has changed; when it may be written again, the run goes on."""
    run = Path(killed["out"])
    before = content_of(run)
    locked_away(run)
    for command in ({"command": "fit"}, {"command": "resume"}, {"command": "fit", "resume": False, "fresh": True}):
        child = stage.train(killed, nobody_special=True, **command)
        assert child.wait() == 2, child.said
        assert "Permission denied" in child.said
        assert "make the folder writable" in child.said
        assert "Traceback" not in child.said
    assert content_of(run) == before
    below = stage.train(stage.recipe(out=run / "below" / "it"), nobody_special=True, notes=f"{run}.below")
    assert below.wait() == 2
    assert "cannot be made: Permission denied" in below.said
    run.chmod(0o755)
    assert_went_on(run, stage.finish(killed))
    assert_same_end(run, stage.whole())


@pytest.mark.slow
def test_a_run_that_is_alive_is_left_alone(stage, killed):
    """While a process trains there, no other can resume, replace or begin a run in its folder."""
    at_work = stage.train(killed)
    at_work.wait_until(lambda: status_of(killed["out"])["state"] == "running" and "resuming from" in at_work.said)
    at_work.kill(signal.SIGSTOP)  # it is slow, and not dead
    for command in ({"resume": True}, {"command": "resume"}, {"resume": False, "fresh": True}):
        other = stage.train(killed, **command)
        assert other.wait() == 2
        assert f"is in use by process {at_work.pid}" in other.said
    other = stage.train(killed, resume=False)
    assert other.wait() == 2
    assert "holds a run that is not finished" in other.said
    os.kill(at_work.pid, signal.SIGCONT)
    assert at_work.wait() == 0
    assert_went_on(killed["out"], at_work.said)
    assert_same_end(killed["out"], stage.whole())


@pytest.mark.slow
def test_of_several_that_resume_at_once_one_goes_on(stage, killed, tmp_path):
    go = tmp_path / "go"
    started = [stage.train(killed, waits_for=str(go)) for _ in range(3)]
    go.touch()
    codes = sorted(child.wait() for child in started)
    assert codes == [0, 2, 2], [child.said for child in started]
    winner = next(child for child in started if child.code == 0)
    assert_went_on(killed["out"], winner.said)
    for loser in started:  # who has refused it need not have won: each holds the folder for a moment to look into it
        assert loser is winner or any(f"is in use by process {child.pid} " in loser.said for child in started)
    assert_same_end(killed["out"], stage.whole())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("gpt2", "causal-lm"), ("t5", "seq2seq-lm")])
def test_a_model_that_waited_for_room_is_the_one_of_its_time(stage, tmp_path, name, kind):
    """Byte for byte, also where weights are tied; what was trained since then is not in it."""
    stage.make_models({name: {"name": name}})
    child = stage.start("export_without_room", model=stage.models[name], kind=kind, folder=str(tmp_path))
    assert child.wait() == 0, child.said
    assert "it waits in memory" in child.said
    at_once, waited = tmp_path / "at-once", tmp_path / "waited"
    assert {path.name for path in waited.iterdir()} == {path.name for path in at_once.iterdir()}
    for path in at_once.iterdir():
        assert (waited / path.name).read_bytes() == path.read_bytes(), path.name
