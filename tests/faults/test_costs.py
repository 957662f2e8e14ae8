"""What a resume costs: no memory that the run did not have before, and no more time the later it comes."""

import json
import shutil
import signal
from pathlib import Path

import pytest
from fault_stage import assert_went_on, notes_of, saved_steps

from tiny_runs import reviews, write_csv

LARGE = {
    "name": "bert",
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
}


def test_a_resumed_run_holds_no_more_tensors(stage):
    """All tensors that Python knows, counted after the same steps: what was loaded is not kept a second time."""
    undisturbed, killed = stage.recipe(), stage.recipe()
    stage.finish(undisturbed, measure_at=[22, 33])
    assert stage.train(killed, at={"21": "saved 20; die"}).wait() == -signal.SIGKILL
    said = stage.finish(killed, measure_at=[22, 33])
    assert assert_went_on(killed["out"], said) == 20
    whole, resumed = (notes_of(recipe["out"])["measured"] for recipe in (undisturbed, killed))
    for step in ("22", "33"):
        assert resumed[step]["num_bytes"] <= whole[step]["num_bytes"]
        assert resumed[step]["num_storages"] <= whole[step]["num_storages"]


@pytest.mark.slow
def test_a_resumed_process_is_no_larger(stage):
    """The largest size that the system saw, with a model of 50 MB and its moments; it varies by some megabytes."""
    stage.make_models({"large": LARGE})
    sizes = []
    for at in ({}, {"8": "saved 5; die"}):
        recipe = stage.recipe(model="large", train={"epochs": 2, "freeze": {}})
        if at:
            assert stage.train(recipe, at=at).wait(120) == -signal.SIGKILL
        child = stage.train(recipe)
        assert child.wait(120) == 0, child.said
        sizes.append(notes_of(recipe["out"])["peak_rss_kib"] / 1024)
    assert_went_on(recipe["out"], child.said)
    assert sizes[1] < sizes[0] + 25, sizes


@pytest.mark.slow
def test_the_time_limit_leaves_time_for_the_save(stage):
    """States of 150 MB: the last one is on the disk before the time is over, not begun by then."""
    stage.make_models({"large": LARGE})
    limit_s = 8
    recipe = stage.recipe(
        model="large", train={"epochs": 100, "freeze": {}, "max_time": f"{limit_s}s"}, evaluate={"every": "1000 steps"}
    )
    child = stage.train(recipe)
    assert child.wait(120) == 0, child.said
    assert notes_of(recipe["out"])["fit"]["interruption"] == "time limit"
    run = Path(recipe["out"])
    began = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["time"]
    times = [
        (run / "checkpoints" / f"step-{step}" / "trimtab.json").stat().st_mtime - began for step in saved_steps(run)
    ]
    assert limit_s / 2 < times[-1] < limit_s


@pytest.mark.parametrize("late", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_a_late_resume_takes_as_long_as_an_early_one(stage, late, tmp_path):
    """Counted in calls of functions until the first step, which no busy machine disturbs: rows are not replayed."""
    num_rows = late + 20
    rows = write_csv(tmp_path / "rows.csv", reviews(num_rows))
    recipe = stage.recipe(
        data={"train": str(rows), "eval_share": 0},
        train={"epochs": 1, "batch_size": 1, "log_every": 1000, "freeze": {}},
        memory={"micro_batch": 1},
        checkpoint={"every": "10 steps"},
        early_stopping=None,
        evaluate={},
    )
    assert stage.train(recipe, at={"12": "saved 10; die"}).wait() == -signal.SIGKILL
    early = stage.recipe()["out"]
    shutil.copytree(recipe["out"], early)
    options = {"sets": [f"checkpoint.every={late} steps"]}
    at = {str(late + 1): f"saved {late}; die"}
    assert stage.train(recipe, command="resume", options=options, at=at).wait(120) == -signal.SIGKILL
    num_calls = {}
    for step, run in ((10, early), (late, recipe["out"])):
        options = {"sets": [f"train.epochs={(step + 2) / num_rows}"]}  # it ends soon after
        said = stage.finish({"out": run}, command="resume", options=options, measure_at=["first"])
        assert assert_went_on(run, said) == step
        num_calls[step] = notes_of(run)["measured"]["num_calls"]
    assert num_calls[late] - num_calls[10] < 2 * (late - 10) + 1000  # a row that is replayed takes some fifty
