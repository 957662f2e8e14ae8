"""Finished runs that are trained for longer, from the end or from before it, and recipes that have changed since."""

import shutil
from pathlib import Path

import pytest
from fault_stage import NUM_STEPS, assert_same_end, assert_went_on, saved_steps

from tiny_runs import reviews, write_csv

# without an end in its schedule, a run is the beginning of a longer one; a log falls on its last step in any case
CONSTANT = {"train": {"schedule": "constant", "log_every": 4}}


@pytest.fixture(scope="module")
def finished(stage):
    """Gives copies of a finished run of four epochs."""
    whole = stage.whole("constant", **CONSTANT)

    def copy():
        recipe = stage.recipe(**CONSTANT)
        shutil.copytree(whole, recipe["out"])
        return recipe

    return copy


def resume(stage, recipe, *sets, **options):
    return stage.train(recipe, command="resume", options={"sets": sets, **options})


@pytest.mark.slow
def test_two_more_epochs(stage, finished):
    """Trained on, it is the run of six epochs to the bit, and it says what is not as it was."""
    recipe = finished()
    child = resume(stage, recipe, "train.epochs=6", "checkpoint.keep=3", "train.log_every=4")
    assert child.wait() == 0, child.said
    assert assert_went_on(recipe["out"], child.said) == NUM_STEPS
    assert "train.epochs: 4.0 → 6.0 (takes effect from here on)" in child.said
    assert "checkpoint.keep: 2 → 3 (does not change results)" in child.said
    assert "train.log_every" not in child.said
    assert_same_end(recipe["out"], stage.whole("six epochs", train=CONSTANT["train"] | {"epochs": 6}))


@pytest.mark.slow
def test_a_finished_run_that_is_resumed_as_it_is(stage, finished):
    """Nothing is left to do, and nothing is done."""
    recipe = finished()
    child = resume(stage, recipe)
    assert child.wait() == 0, child.said
    assert "all steps of the run are done" in child.said
    assert not Path(f"{recipe['out']}.steps").read_text()
    assert_same_end(recipe["out"], stage.whole("constant"))


@pytest.mark.slow
def test_other_rows_are_refused(stage, tmp_path):
    """The recipe names the same file, but since then its rows have changed, or some were taken out."""
    rows = write_csv(tmp_path / "rows.csv", reviews(88))
    recipe = stage.recipe(data={"train": str(rows)})
    stage.finish(recipe)
    for others, words in ((reviews(88, first=500), "the training rows differ"), (reviews(40), "the batch size differ")):
        write_csv(rows, others)
        child = resume(stage, recipe, "train.epochs=5")
        assert child.wait() == 2
        assert words in child.said
        assert child.said.count("cure: ") == child.said.count("cure: resume with the") == 1
    write_csv(rows, reviews(88))
    child = resume(stage, recipe, "train.epochs=5")
    assert child.wait() == 0, child.said
    assert assert_went_on(recipe["out"], child.said) == NUM_STEPS


@pytest.mark.slow
def test_from_a_state_before_the_last(stage, finished):
    """The steps after it are taken again, and everything that was written of them is replaced."""
    recipe = finished()
    assert saved_steps(recipe["out"]) == [35, 40]
    killed = stage.train(recipe, command="resume", options={"from_step": "step-35"}, at={"37": "die"})
    assert killed.wait() == -9
    assert saved_steps(recipe["out"]) == [35]  # nothing goes on from what comes after it
    child = resume(stage, recipe)
    assert child.wait() == 0, child.said
    assert assert_went_on(recipe["out"], child.said) == 35
    assert_same_end(recipe["out"], stage.whole("constant"))
    for wrong, words in (("step-7", "there are: step-35, step-40"), ("banana", "names no checkpoint")):
        child = resume(stage, recipe, from_step=wrong)
        assert child.wait() == 2
        assert words in child.said
