"""What a resume costs, and what it refuses: other rows than those of the run."""

import shutil
import signal

import pytest
from fault_stage import NUM_STEPS, assert_went_on, notes_of

from tiny_runs import reviews, write_csv


@pytest.mark.slow
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
def test_a_late_resume_reads_no_more_rows_than_an_early_one(stage, tmp_path):
    """Reading the earlier rows again would take longer the later a run is resumed."""
    late = 30
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
    assert stage.train(recipe, command="resume", options=options, at=at).wait() == -signal.SIGKILL
    num_read = {}
    for step, run in ((10, early), (late, recipe["out"])):
        options = {"sets": [f"train.epochs={(step + 2) / num_rows}"]}  # it ends soon after
        said = stage.finish({"out": run}, command="resume", options=options, measure_at=["first"])
        assert assert_went_on(run, said) == step
        num_read[step] = notes_of(run)["measured"]["num_rows_read"]
    assert 0 < num_read[late] == num_read[10]


@pytest.mark.slow
def test_other_rows_are_refused(stage, tmp_path):
    """The recipe names the same file, but since then its rows have changed, or some were removed."""
    rows = write_csv(tmp_path / "rows.csv", reviews(88))
    recipe = stage.recipe(data={"train": str(rows)})
    stage.finish(recipe)
    more = {"command": "resume", "options": {"sets": ["train.epochs=5"]}}
    for others, words in (
        (reviews(88, first=500), "the training rows differ from those"),
        (reviews(40), "the data or the batch size differ"),
    ):
        write_csv(rows, others)
        child = stage.train(recipe, **more)
        assert child.wait() == 2
        assert words in child.said
        assert child.said.count("cure: ") == child.said.count("cure: resume with the") == 1
    write_csv(rows, reviews(88))
    assert assert_went_on(recipe["out"], stage.finish(recipe, **more)) == NUM_STEPS
