"""Runs that are killed or stopped from outside, at any moment, and by a time limit."""

import signal
import time

import pytest
from fault_stage import assert_same_end, assert_went_on, draw, goes_on_from, notes_of, saved_steps, status_of

NUM_RANDOM_KILLS = 8


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_random_moments(stage, seed):
    """By the clock, from outside, and before the nth thing that is done to a file; also while a run is resumed."""
    random, whole, num_kills, num_resumed = draw(seed), stage.whole(), 0, 0
    seconds, num_events = (notes_of(whole)[key] for key in ("seconds", "num_events"))
    while num_kills < NUM_RANDOM_KILLS:
        recipe = stage.recipe()
        code = None
        while code != 0:
            saved = saved_steps(recipe["out"])
            by_clock, is_enough = random.random() < 0.5, num_kills == NUM_RANDOM_KILLS
            moment = random.uniform(0.0, seconds) if by_clock else random.randint(1, num_events)
            child = stage.train(recipe, kill={"nth": moment} if not (by_clock or is_enough) else None)
            if by_clock and not is_enough:
                time.sleep(moment)
                child.kill()
            code = child.wait()
            assert code in (0, -signal.SIGKILL), (moment, child.said[-3000:])
            if "steps of 8 rows" in child.said:  # it came to the point where it reports the step it resumes from
                assert goes_on_from(child.said) == (saved[-1] if saved else 0), (moment, child.said)
            num_kills += code != 0
            num_resumed += goes_on_from(child.said) > 0
        assert_same_end(recipe["out"], whole)
    assert num_resumed >= 2


def test_a_signal_from_outside(stage):
    recipe = stage.recipe()
    child = stage.train(recipe)
    child.wait_until(lambda: saved_steps(recipe["out"]))
    child.kill(signal.SIGTERM)
    assert child.wait() == 75
    said = stage.finish(recipe)
    assert_went_on(recipe["out"], said)
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_the_time_limit(stage):
    """The time is over after step 9 at the latest; a resumed run has the whole time again."""
    recipe = stage.recipe(train={"max_time": "1s"})
    stage.finish(recipe, at={"9": "sleep 1.0"})
    result = notes_of(recipe["out"])["fit"]
    assert result["interruption"] == result["stop_reason"] == "time limit"
    assert 1 <= result["step"] <= 9
    assert saved_steps(recipe["out"])[-1] == result["step"]
    assert status_of(recipe["out"])["state"] == "stopped"
    said = stage.finish(recipe | {"train": recipe["train"] | {"max_time": None}})
    assert assert_went_on(recipe["out"], said) == result["step"]
    assert "train.max_time" in said
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("update", "state"),
    [("in-backward", "none"), ("in-backward", "host"), ("device", "host"), ("streamed", "none"), ("host", "none")],
)
def test_killed_with_weights_that_are_updated_elsewhere(stage, update, state):
    """A real SIGKILL after a step behind the last checkpoint; the run ends as an undisturbed one."""
    memory = {"update": update, "offload_state": state}
    in_backward = {"train": {"max_grad_norm": None}, "memory": {**memory, "micro_batch": "auto"}}
    changes = in_backward if update == "in-backward" else {"memory": memory}
    recipe = stage.recipe(**changes)
    child = stage.train(recipe, at={"17": "die"})
    assert child.wait() == -signal.SIGKILL, child.said[-3000:]
    assert saved_steps(recipe["out"])[-1] in (10, 15)
    said = stage.finish(recipe)
    assert_went_on(recipe["out"], said)
    assert_same_end(recipe["out"], stage.whole(**changes))
