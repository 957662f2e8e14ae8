"""Runs and models on Databricks, by a stand-in for a workspace (`databricks_workspace`): no real one was ever used."""

from pathlib import Path

import pytest
from databricks_workspace import Databricks
from mlflow_servers import rows_in, rows_on, run_id_of, runs_on, wait_until
from test_sync import make_run
from tracked_models import CLASSIFIER, contents, exported, loud

from tiny_runs import reviews, write_csv

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own use of sqlalchemy
    pytest.mark.usefixtures("own_folder", "tracked"),
]
NAME = "main.films.reviews"


@pytest.fixture
def workspace(server, tmp_path, monkeypatch):
    workspace = Databricks(server.port, tmp_path / "workspace")
    for name, value in workspace.environment().items():
        monkeypatch.setenv(name, value)
    yield workspace
    workspace.close()


def finished_run(path, tiny, value, experiment, name, seed=0):
    """A run with 1,500 steps and a model, and with settings that are longer than a workspace takes."""
    track = f"{{uri: databricks, experiment: {experiment}, register_as: {name}}}"
    params = {f"key{number}": "é" * (4_000 if number == 0 else 3) for number in range(150)}
    facts = {"metric_name": "accuracy", "best_metric": value, "higher_is_better": True}
    run = make_run(path, 1_500, track=track, params=params, **facts).path
    weights = loud(tiny) if seed == 0 else tiny.folder("bert", kind=CLASSIFIER, initializer_range=0.4)
    exported(run / "best", weights, CLASSIFIER, "classify", metrics={"accuracy": value})
    return run


def test_a_run_moves_to_a_workspace_and_back(trimtab_command, workspace, store, server, tiny):
    run = finished_run(Path("runs/mine/001"), tiny, 0.5, "/Users/somebody@example.com/films", "main.films.moved")
    local = f"sqlite:///{store}"
    for address in (local, "databricks", local, "databricks"):
        code, out, err = trimtab_command("track", "sync", run, "--to", address)
        assert (code, err) == (0, ""), err
        assert address.partition(":")[0] in out
    assert workspace.refusals == []
    assert rows_on(store, run_id_of(run, 0)) == rows_in(run)
    assert rows_on(server.store, run_id_of(run, 1)) == rows_in(run)
    (there,) = [one for one in runs_on(server.store) if one["id"] == run_id_of(run, 1)]
    (here,) = runs_on(store)
    assert (there["status"], there["params"], there["name"]) == ("FINISHED", here["params"], here["name"])
    assert there["tags"]["trimtab.run"] == here["tags"]["trimtab.run"]
    files = {path.name for path in workspace.folder.rglob("*") if "Runs" in path.parts}
    assert {"metrics.jsonl", "plan.json", "recipe.yaml"} <= files


def test_a_model_in_unity_catalog(trimtab_command, workspace, tiny):
    first = finished_run(Path("runs/films/001"), tiny, 0.5, "unity", NAME)
    second = finished_run(Path("runs/films/002"), tiny, 0.75, "unity", NAME, seed=1)
    for run in (first, second):
        code, _, err = trimtab_command("track", "sync", run, "--to", "databricks")
        assert code == 0, err
    for model, run in ((f"models:/{NAME}/1", first), (f"models:/{NAME}@best", second), ("unity", second)):
        folder = Path("pulled") / run.name / model.partition(":")[0]
        code, _, err = trimtab_command("pull", model, folder, "--uri", "databricks")
        assert code == 0, err
        assert contents(folder)["model.safetensors"] == contents(run / "best")["model.safetensors"]
    code, out, _ = trimtab_command("best", "unity", "--uri", "databricks")
    assert (code, [line.split()[:3] for line in out.splitlines()][1]) == (0, ["best", "002", "0.7500"])
    assert workspace.refusals == []


def test_training_straight_to_a_workspace(trimtab_command, workspace, server, tiny):
    rows = write_csv(Path("films.csv"), reviews(24))
    workspace.num_to_throttle = 2  # the first answers: too many requests, try again in a second
    arguments = ("--set", "train.epochs=1", "--set", "track.uri=databricks", "--out", "runs/films/003")
    code, _, err = trimtab_command("train", "--model", tiny.folder("bert"), "--data", rows, *arguments)
    assert code == 0, err
    run = Path("runs/films/003")
    wait_until(lambda: rows_on(server.store, run_id_of(run)) == rows_in(run))
    assert {one.partition(":")[0] for one in workspace.refusals} == {"REQUEST_LIMIT_EXCEEDED"}


def test_what_a_workspace_refuses(trimtab_command, workspace, monkeypatch):
    monkeypatch.setenv("DATABRICKS_TOKEN", "another")
    code, _, err = trimtab_command("best", "films", "--uri", "databricks")
    assert code == 2
    assert "check DATABRICKS_HOST and DATABRICKS_TOKEN" in err
    workspace.close()
    code, _, err = trimtab_command("best", "films", "--uri", "databricks")  # at once, not after minutes of retries
    assert code == 2
    assert f"the Databricks workspace {workspace.host} cannot be reached" in err
    for name in workspace.environment():
        monkeypatch.delenv(name)
    code, _, err = trimtab_command("best", "films", "--uri", "databricks")
    assert code == 2
    assert "set DATABRICKS_HOST and DATABRICKS_TOKEN" in err
