"""What is asked of MLflow, on a real sqlite store."""

import math
import os
import sqlite3

import pytest
from mlflow_servers import rows_on, runs_on

from trimtab.tracking.mlflow.server import (
    ExperimentDeleted,
    MlflowServer,
    Row,
    describe_failure,
    mlflow_environment,
    valid_key,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own use of sqlalchemy


@pytest.fixture
def local(store):
    with mlflow_environment(f"sqlite:///{store}"):
        yield MlflowServer(f"sqlite:///{store}")


@pytest.fixture
def run_id(local):
    return local.open_run(local.experiment_id("mine"), "001", "token", 1_000, None)


def test_a_run_is_made_once(local, store, run_id):
    """The answer to its making may have been lost: then it is found."""
    experiment = local.experiment_id("mine")
    assert local.open_run(experiment, "001", "token", 1_000, None) == run_id
    other = local.open_run(experiment, "001", "another", 1_000, parent=run_id)
    assert other != run_id
    first, second = sorted(runs_on(store), key=lambda run: run["id"] != run_id)
    assert (first["name"], first["status"], first["tags"]["trimtab.run"]) == ("001", "RUNNING", "token")
    assert second["tags"]["mlflow.parentRunId"] == run_id
    assert local.client.get_run(run_id).info.artifact_uri.startswith(f"file://{store.parent}/mlartifacts/")


def test_an_experiment_that_was_deleted(local):
    local.client.delete_experiment(local.experiment_id("gone"))
    with pytest.raises(ExperimentDeleted) as failure:
        local.experiment_id("gone")
    assert "track.experiment" in describe_failure(failure.value, local.uri).cure


def test_rows_may_be_sent_twice(local, store, run_id):
    values = [0.1, -0.0, 1e-300, 1 / 3, math.nan, math.inf, -math.inf, float(2**60)]
    rows = [Row(f"k{i % 7}", values[i % len(values)], 1_000 + i, i) for i in range(2_500)]
    assert local.log_rows(run_id, rows) == []
    once = rows_on(store, run_id)
    assert len(once) == len(rows)
    assert local.log_rows(run_id, rows[:1_500]) == []
    assert rows_on(store, run_id) == once


def test_a_row_that_is_not_taken_costs_no_other(local, store, run_id):
    rows = [Row("a%b" if i == 77 else "good", float(i), 1_000, i) for i in range(200)]
    assert local.log_rows(run_id, rows) == [rows[77]]
    assert len(rows_on(store, run_id)) == 199


def test_parameters_beyond_all_limits(local, store, run_id):
    params = {f"key.{i}": "x" for i in range(250)} | {
        "long": "é" * 20_000,
        "k" * 400: "v",
        "train.freeze.*.layer.[0]": "always",
        "empty": "",
    }
    assert local.log_params(run_id, params) == {}
    (run,) = runs_on(store)
    assert len(run["params"]) == len(params)
    assert 5_998 <= len(run["params"]["long"].encode()) <= 6_000
    assert run["params"]["long"].endswith("…")
    assert "long" in run["tags"]["trimtab.cut"]
    assert run["params"]["train.freeze._.layer._0_"] == "always"
    assert local.log_params(run_id, params | {"key.3": "y"}) == {"key.3": ("x", "y")}
    assert runs_on(store)[0]["params"]["key.3"] == "x"  # MLflow keeps the first


def test_tags_are_cut_and_replaced(local, store, run_id):
    local.set_tags(run_id, {"a": "x" * 9_000} | {f"t{i}": "1" for i in range(150)})
    local.set_tags(run_id, {"t3": "2"})
    tags = runs_on(store)[0]["tags"]
    assert (len(tags["a"]), tags["t3"], tags["t149"]) == (4_998, "2", "1")  # with an ellipsis, which has three bytes


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("loss", "loss"),
        ("eval/f1 macro:2", "eval/f1 macro:2"),
        ("top%1", "top_1"),
        ("größe", "größe"),
        ("/a//b/", "a/b"),
        ("../x", "_x"),
        (".", "_"),
        ("", "_"),
        ("x" * 300, "x" * 250),
        ("é" * 300, "é" * 125),
    ],
)
def test_names_that_mlflow_takes(local, run_id, name, taken):
    assert valid_key(name) == taken
    assert local.log_rows(run_id, [Row(taken, 1.0, 1_000, 1)]) == []


class _Failure(Exception):
    def __init__(self, text, code=""):
        super().__init__(text)
        self.error_code = code


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (_Failure("no", "UNAUTHENTICATED"), "MLFLOW_TRACKING_TOKEN"),
        (_Failure("no", "PERMISSION_DENIED"), "does not allow this user to write"),
        (_Failure("no run", "RESOURCE_DOES_NOT_EXIST"), "http://h does not have this object: no run"),
        (_Failure("404", "ENDPOINT_NOT_FOUND"), "not an MLflow server"),
        (_Failure("bad", "INVALID_PARAMETER_VALUE"), "bad"),
        (_Failure("(sqlite3.OperationalError) database is locked", "TEMPORARILY_UNAVAILABLE"), "is locked"),
        (_Failure("x NewConnectionError: [Errno 111] Connection refused'))"), "http://h: Connection refused"),
        (_Failure("… Read timed out. (read timeout=1)"), "Read timed out"),
        (OSError(28, "No space left on device", "/files/x"), "No space left on device: /files/x"),
        (sqlite3.OperationalError("disk I/O error"), "disk I/O error"),
    ],
)
def test_errors_are_described_in_one_line(error, words):
    failure = describe_failure(error, "http://h")
    assert words in str(failure)
    assert "\n" not in str(failure)
    assert failure.is_gone == ("no run" in words)


@pytest.mark.parametrize(
    ("given_for", "server", "is_sent"),
    [
        (None, "http://any:5000", True),
        ("http://me:s3cr3t@mine:5000/", "http://mine:5000", True),
        ("http://mine:5000", "http://other:5000", False),
        ("http://mine:5000", "https://mine:5000", False),
        ("sqlite:///m.db", "http://any:5000", True),
    ],
)
def test_credentials_go_to_the_server_that_they_were_given_for(monkeypatch, given_for, server, is_sent):
    names = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
    for name in names:
        monkeypatch.setenv(name, "mine")
    if given_for is not None:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given_for)
    with mlflow_environment(server):
        assert [os.environ.get(name) for name in names] == (["mine"] * 3 if is_sent else [None] * 3)
        cure = describe_failure(_Failure("no", "UNAUTHENTICATED"), server).cure
    assert ("for MLFLOW_TRACKING_URI" in cure) is not is_sent
    assert [os.environ.get(name) for name in names] == ["mine"] * 3
