"""Two processes that train together: one is killed, both are stopped, and others go on in their place."""

import json
import signal
from pathlib import Path

import pytest
from fault_stage import assert_same_end, assert_went_on, goes_on_from, saved_steps, status_of


@pytest.fixture(scope="module")
def whole(stage):
    recipe = stage.recipe()
    stage.finish_together(recipe)
    return Path(recipe["out"])


@pytest.mark.parametrize("rank", [0, 1])
def test_one_of_them_is_killed(stage, whole, rank):
    """The other one ends by itself and says why; started again, both go on, to the same bits."""
    recipe = stage.recipe()
    killed_at = {rank: {"at": {"17": f"saved 15; die" if rank == 0 else "die"}}}
    started = stage.train_together(recipe, killed_at)
    assert started[rank].wait() == -signal.SIGKILL
    assert started[1 - rank].wait() == 1, started[1 - rank].said
    assert f"rank {rank}" in started[1 - rank].said
    saved = saved_steps(recipe["out"])[-1]
    said = stage.finish_together(recipe)
    assert goes_on_from(said) == saved >= 10
    assert_same_end(recipe["out"], whole)
