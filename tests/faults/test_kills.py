"""A run that is killed, anywhere and as often as you like, ends with the same bits as one that was left alone."""

import signal
import time

import pytest
from fault_stage import (
    NUM_STEPS,
    assert_same_end,
    assert_went_on,
    draw,
    goes_on_from,
    notes_of,
    saved_steps,
    status_of,
    steps_by_process,
)

# Where a process dies: a step; the batch of an evaluation; or just before something is done to a file.
PLACES = {
    "before the first save": {"at": {"3": "die"}},
    "after a step": {"at": {"23": "die"}},
    "in the first evaluation": {"dies_in_evaluation": 1},
    "in a later evaluation": {"dies_in_evaluation": 6},
    "save begins": {"kill": {"event": "os.mkdir", "path": ".step-10.writing-", "nth": 1}},
    "weights written, optimizer not": {"kill": {"event": "open", "path": "/optimizer.safetensors", "nth": 3}},
    "all written but the manifest": {"kill": {"event": "open", "path": "-15.writing-", "nth": 7}},
    "before the rename": {"kill": {"event": "os.rename", "path": ".step-20.writing-", "nth": 1}},
    "after the rename": {"kill": {"event": "os.rename", "path": ".step-15.removing-", "nth": 1}},
    "old state half removed": {"kill": {"event": "os.rmdir", "path": "", "nth": 2}},
    "best model half written": {"kill": {"event": "open", "path": ".best.writing-", "nth": 3}},
    "best model changes places": {"kill": {"event": "ctypes.dlsym", "path": "renameat2", "nth": 1}},
    "status half written": {"kill": {"event": "os.rename", "path": ".run.json.writing", "nth": 9}},
}


def go_on_until_killed(stage, recipe, **how):
    """One process, which has to die as told; gives the step it went on from."""
    child = stage.train(recipe, **how)
    assert child.wait() == -signal.SIGKILL, f"{how} never came: {child.said[-3000:]}"
    return goes_on_from(child.said)


def test_killed_three_times_at_bad_moments(stage):
    """Three kills in a row; the first comes before anything was saved, so that the second start begins anew."""
    recipe = stage.recipe()
    places = ["before the first save", "weights written, optimizer not", "best model changes places"]
    before = [go_on_until_killed(stage, recipe, **PLACES[place]) for place in places]
    assert before[0] == 0
    said = stage.finish(recipe)
    assert_went_on(recipe["out"], said)
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_killed_at_a_bad_moment(stage, place):
    recipe = stage.recipe()
    go_on_until_killed(stage, recipe, **PLACES[place])
    saved = saved_steps(recipe["out"])
    said = stage.finish(recipe)
    assert goes_on_from(said) == (saved[-1] if saved else 0)
    assert_same_end(recipe["out"], stage.whole())


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
            if "steps of 8 rows" in child.said:  # it came to the point where it says from where it goes on
                assert goes_on_from(child.said) == (saved[-1] if saved else 0), (moment, child.said)
            num_kills += code != 0
            num_resumed += goes_on_from(child.said) > 0
        assert_same_end(recipe["out"], whole)
    assert num_resumed >= 2


@pytest.mark.slow
def test_killed_while_it_makes_room_for_a_fresh_start(stage):
    """What is left is still a run that the same command replaces."""
    recipe = stage.recipe()
    go_on_until_killed(stage, recipe, at={"23": "die"})
    fresh = {"resume": False, "fresh": True}
    go_on_until_killed(stage, recipe, **fresh, kill={"event": "os.rmdir", "nth": 2})
    said = stage.finish(recipe, **fresh)
    assert goes_on_from(said) == 0
    assert_same_end(recipe["out"], stage.whole())


EARLY = {"early_stopping": {"metric": "length", "mode": "max", "patience": 2}}  # the same in every evaluation


@pytest.mark.slow
@pytest.mark.parametrize("name", ["standard", "stopped early"])
def test_killed_when_all_steps_are_done(stage, name):
    """But before it said so: nothing is left to train, and so nothing is trained."""
    changes = EARLY if name == "stopped early" else {}
    recipe, whole = stage.recipe(**changes), stage.whole(name, **changes)
    go_on_until_killed(stage, recipe, at={"21": "saved 20; die"})  # after one of the two evaluations that end it
    go_on_until_killed(stage, recipe, at={"end": "die"})
    steps = steps_by_process(recipe["out"])
    assert status_of(recipe["out"])["state"] == "running"
    said = stage.finish(recipe)
    assert goes_on_from(said) == steps[-1][-1] == (24 if changes else NUM_STEPS)
    assert steps_by_process(recipe["out"]) == steps
    assert notes_of(recipe["out"])["fit"]["stop_reason"] == notes_of(whole)["fit"]["stop_reason"]
    assert_same_end(recipe["out"], whole)
