"""A loss that is not a number: the run stops and explains, or leaves the step out, or goes back and around it, once."""

import json
import shlex
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, notes_of, saved_steps, status_of, steps_by_process

from tiny_runs import GOOD, lines_of, reviews, write_csv

BAD_LENGTH = 14  # in tokens: no other row is so long
BAD_TEXT = " ".join(GOOD * 3)


@pytest.fixture(scope="module")
def recipe_of(stage):
    """Recipes whose data have one row that has no loss."""
    rows = write_csv(stage.folder / "bad.csv", [*reviews(79), {"text": BAD_TEXT, "label": "good"}])
    held_out = write_csv(stage.folder / "held-out.csv", reviews(9, first=100))

    def make(on_nan, **train):
        return stage.recipe(
            train={"on_nan": on_nan, **train}, data={"train": str(rows), "eval": str(held_out)}
        )

    return make


def losses_of(run):
    return {line["step"]: line["loss"] for line in lines_of(run) if "loss" in line}


def test_stop_explains(stage, recipe_of):
    recipe = recipe_of("stop", epochs=1, log_every=1)
    child = stage.train(recipe, loss={"bad_length": BAD_LENGTH})
    assert child.wait() == 1
    print(child.said)
    raise AssertionError
