"""Several processes in one folder: one trains, the others are refused with the id of that process."""

import os
import re
import signal
import time

import pytest
from fault_stage import assert_same_end, assert_went_on, saved_steps, status_of


@pytest.fixture
def killed(stage):
    """A run that was killed after step 23, so it can resume from step 20."""
    recipe = stage.recipe()
    assert stage.train(recipe, at={"23": "die"}).wait() == -signal.SIGKILL
    return recipe


@pytest.mark.slow
def test_a_run_that_is_alive_is_left_alone(stage, killed):
    """While a process trains there, no other can resume, replace or start a run in its folder."""
    at_work = stage.train(killed)
    at_work.wait_until(lambda: status_of(killed["out"])["state"] == "running" and "resuming from" in at_work.said)
    at_work.kill(signal.SIGSTOP)  # it is slow, and not dead
    for command in ({"resume": True}, {"command": "resume"}, {"resume": False, "fresh": True}):
        other = stage.train(killed, **command)
        assert other.wait() == 2
        assert f"is in use by process {at_work.pid}" in other.said
    other = stage.train(killed, resume=False)
    assert other.wait() == 2
    assert "contains an unfinished run" in other.said
    os.kill(at_work.pid, signal.SIGCONT)
    assert at_work.wait() == 0
    assert_went_on(killed["out"], at_work.said)
    assert_same_end(killed["out"], stage.whole())


@pytest.mark.slow
def test_of_several_that_resume_at_once_one_trains(stage, killed, tmp_path):
    go, refused = tmp_path / "go", tmp_path / "refused"
    # the one that trains waits near its end for the others: a finished run would be no conflict
    started = [stage.train(killed, waits_for=str(go), at={"38": f"there {refused}"}) for _ in range(3)]
    go.touch()
    deadline = time.monotonic() + 400
    while sum(child.poll() is not None for child in started) < 2:
        assert time.monotonic() < deadline, [child.said for child in started]
        time.sleep(0.01)
    refused.touch()
    codes = sorted(child.wait() for child in started)
    assert codes == [0, 2, 2], [child.said for child in started]
    winner = next(child for child in started if child.code == 0)
    assert_went_on(killed["out"], winner.said)
    for (
        loser
    ) in started:  # the one that refused it need not have won: each holds the folder for a moment to look into it
        assert loser is winner or any(f"is in use by process {child.pid} " in loser.said for child in started)
    assert_same_end(killed["out"], stage.whole())


@pytest.mark.slow
def test_started_twice_with_resume(stage):
    """The second is told which process trains there, and not to use the option that it was given."""
    for _ in range(3):
        recipe = stage.recipe()
        children = [stage.train(recipe, at={"20": "sleep 1"}) for _ in range(2)]
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
    first = stage.train(recipe, at={"20": "sleep 60"})
    first.wait_until(lambda: saved_steps(recipe["out"]) == [10, 15])
    words = rf"unfinished run \(step \d+ of 40\), which process {first.pid} on this machine is training\n.*"
    cure = rf"cure: wait until it is done, or stop it \(kill {first.pid}\), then run the command again"
    other = stage.train(recipe, resume=False)
    assert other.wait() == 2
    assert re.search(words + cure, other.said), other.said
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    other = stage.train(recipe, resume=False)
    assert other.wait() == 2
    assert "cure: pass --resume to resume it" in other.said


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [(["check", "{recipe}"], 1), (["check", "nothing.yaml"], 2)])
def test_no_space_for_the_output_of_a_command(stage, tmp_path, words, code):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"model: {stage.models['bert']}\ndata: {{train: {stage.rows}}}\n")
    words = [word.format(recipe=recipe) for word in words]
    for also_errors in (True, False):
        child = stage.start("command", words=words, output="/dev/full", also_errors=also_errors)
        assert child.wait() == code
    assert "Traceback" not in child.said
    assert child.said.count("cure: ") == 1
