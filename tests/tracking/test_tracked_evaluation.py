"""`--track` of evaluate and shrink: metrics and files are below the run of the model."""

import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tiny_runs import reviews, write_csv
from trimtab import Recipe, fit
from trimtab.runs.tracking_file import Tracking
from trimtab.tracking.mlflow.registry import rank_runs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of MLflow and its dependencies
    pytest.mark.usefixtures("own_folder", "tracked"),
]


@pytest.mark.slow
def test_evaluations_and_forms_are_logged_below_the_run(tiny, empty_store, trimtab_command):
    Path("runs").mkdir()
    uri = f"sqlite:///{Path(shutil.copy(empty_store, 'runs/mlflow.db')).absolute()}"
    data = write_csv(Path("reviews.csv"), reviews(40))
    settings = {"train": {"max_steps": 2}, "track": {"log_model": False}, "checkpoint": {"every": None}}
    fit(
        Recipe(model=tiny.folder("bert"), data={"train": str(data)}, out="runs/reviews/one", **settings),
        progress="quiet",
    )
    tracking = Tracking.read(Path("runs/reviews/one"))
    code, out, err = trimtab_command("evaluate", "runs/reviews/one", "--track", "--out", "found")
    assert code == 0, err
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("reviews")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    run = runs["evaluate one"]
    assert f"run {run.info.run_id}" in out
    assert run.info.status == "FINISHED"
    assert run.data.tags["mlflow.parentRunId"] == tracking.servers[-1].run_id == runs["one"].info.run_id
    assert run.data.params == {"model": "runs/reviews/one", "data": str(data.absolute()), "rows": "4"}
    metrics = run.data.metrics
    assert metrics["test_accuracy_low"] <= metrics["test_accuracy"] <= metrics["test_accuracy_high"]
    assert {"test_loss", "test_f1/good", "test_f1/bad"} <= set(metrics)
    names = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert names == {"evaluation.json", "confusion.png", "worst_rows.csv"}
    code, out, err = trimtab_command("shrink", "runs/reviews/one", "small", "--track", "--max-loss", "100%")
    assert code == 0, err
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    frontier = runs["shrink one"]
    assert frontier.data.tags["mlflow.parentRunId"] == runs["one"].info.run_id
    forms = {name for name, run in runs.items() if run.data.tags.get("mlflow.parentRunId") == frontier.info.run_id}
    assert {"original", "fp16", "int8", "cluster-4"} <= forms
    assert runs["fp16"].data.metrics["test_disk_bytes"] < runs["original"].data.metrics["test_disk_bytes"]
    assert frontier.data.params["recommended"] in forms
    assert "frontier.png" in {file.path for file in client.list_artifacts(frontier.info.run_id)}
    # an evaluation never becomes the best run of its experiment
    ranking = rank_runs("reviews", "accuracy", uri)
    assert ranking.winner.name == "one"
    assert [one.value for one in ranking.runs if one.name == "evaluate one"] == [None]


def test_tracking_that_is_switched_off(tiny, monkeypatch, trimtab_command):
    monkeypatch.setenv("TRIMTAB_TRACK", "none")
    data = write_csv(Path("reviews.csv"), reviews(40))
    settings = {"train": {"max_steps": 1}, "checkpoint": {"every": None}}
    fit(
        Recipe(model=tiny.folder("bert"), data={"train": str(data)}, out="runs/reviews/one", **settings),
        progress="quiet",
    )
    code, _, err = trimtab_command("evaluate", "runs/reviews/one", "--track")
    assert code == 2
    assert "cure: unset TRIMTAB_TRACK" in err


@pytest.mark.slow
def test_the_variants_of_a_comparison_are_nested_runs(tiny, empty_store, trimtab_command):
    Path("runs").mkdir()
    uri = f"sqlite:///{Path(shutil.copy(empty_store, 'runs/mlflow.db')).absolute()}"
    write_csv(Path("reviews.csv"), reviews(40))
    Path("recipe.yaml").write_text(f"model: {tiny.folder('bert')}\ndata: {{train: reviews.csv}}\n")
    steps = ("--steps", "6", "--repeats", "1", "--device", "cpu", "--track")
    code, out, err = trimtab_command("compare", "recipe.yaml", "--vary", "train.lr=1e-3,1e-2,1e30", *steps)
    assert code == 0, err
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("reviews")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"compare-1", "lr 0.001", "lr 0.01", "lr 1.0e+30"}
    parent, failed = runs.pop("compare-1"), runs.pop("lr 1.0e+30")
    assert (parent.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert f"run {parent.info.run_id}" in out
    assert {"report.html", "results.json"} <= {file.path for file in client.list_artifacts(parent.info.run_id)}
    for run in runs.values():
        assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert run.info.status == "FINISHED"
        assert run.data.metrics["test_tokens_per_s"] > 0
        history = client.get_metric_history(run.info.run_id, "test_training_loss")
        assert [point.step for point in history] == [1, 2, 3, 4, 5, 6]
    assert runs["lr 0.01"].data.params["train.lr"] == "0.01"
    assert "Variants of recipe.yaml" in Path("runs/reviews/compare-1/report.html").read_text()
