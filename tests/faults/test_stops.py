"""Signals and the time limit: the run saves, leaves as one that can go on, and the end is the same to the bit."""

import signal

import pytest
from fault_stage import assert_same_end, assert_went_on, goes_on_from, notes_of, saved_steps, status_of

from trimtab.errors import Stopped

SIGNALS = {7: "SIGTERM", 14: "SIGINT", 21: "SIGUSR1", 28: "SIGHUP", 33: "SIGXCPU"}


@pytest.mark.slow
def test_every_signal_saves_and_the_run_goes_on(stage):
    """One run, stopped by one signal after the other; none falls on a step at which a save was due."""
    recipe, before = stage.recipe(), 0
    for step, name in SIGNALS.items():
        child = stage.train(recipe, at={str(step): f"signal {name}"})
        assert child.wait() == Stopped.exit_code == 75, child.said
        assert goes_on_from(child.said) == before
        assert saved_steps(recipe["out"])[-1] == step
        assert f"{name}: the run stops after this step and saves" in child.said
        assert f"signal {name}: saved after step {step}; go on with: trimtab resume {recipe['out']}" in child.said
        assert (status_of(recipe["out"])["state"], status_of(recipe["out"])["step"]) == ("stopped", step)
        before = step
    said = stage.finish(recipe, command="resume")
    assert assert_went_on(recipe["out"], said) == before
    assert_same_end(recipe["out"], stage.whole())


def test_a_signal_from_outside(stage):
    """At whatever moment it comes."""
    recipe = stage.recipe()
    child = stage.train(recipe)
    child.wait_until(lambda: saved_steps(recipe["out"]))
    child.kill(signal.SIGTERM)
    assert child.wait() == 75
    said = stage.finish(recipe)
    assert_went_on(recipe["out"], said)
    assert_same_end(recipe["out"], stage.whole())


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(stage):
    """Without saving; the run goes on from the state before."""
    recipe = stage.recipe()
    child = stage.train(recipe, at={"13": "signal SIGINT; sleep 1.2; signal SIGINT"})
    assert child.wait() == -signal.SIGINT
    assert saved_steps(recipe["out"])[-1] == 10
    assert status_of(recipe["out"])["state"] == "stopped"
    said = stage.finish(recipe)
    assert assert_went_on(recipe["out"], said) == 10
    assert_same_end(recipe["out"], stage.whole())


def test_other_second_signals_wait_for_the_save(stage):
    """Also an interrupt that comes at once again, as it does where the terminal and a launcher both send it."""
    recipe = stage.recipe()
    child = stage.train(recipe, at={"13": "signal SIGINT; signal SIGINT; signal SIGTERM; signal SIGTERM"})
    assert child.wait() == 75
    assert saved_steps(recipe["out"])[-1] == 13


@pytest.mark.slow
def test_the_time_limit(stage):
    """The time is up after step 9 at the latest; whoever goes on has the whole time again."""
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
