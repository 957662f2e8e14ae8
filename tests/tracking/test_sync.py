"""`trimtab track sync` and `trimtab ui`: a run's whole history on any server, and MLflow's page on it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from mlflow_servers import free_port, rows_in, rows_on, run_id_of, runs_on, tracking_of
from tracked_models import CLASSIFIER, exported, loud

from trimtab.runs.run_folder import RunFolder, read_status
from trimtab.tracking.mlflow import ui as page

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own use of sqlalchemy
    pytest.mark.usefixtures("own_folder"),
]


def make_run(path, num_lines=50, state="finished", track="none", params=None, **facts):
    """A run as a training leaves it."""
    folder = RunFolder(path)
    (path / "recipe.yaml").write_text(f"model: tiny\ndata: {{train: reviews.csv}}\ntrack: {track}\n")
    (path / "plan.json").write_text("{}")
    folder.start({"model": "tiny", "train": {"lr": 0.1}, **(params or {})}, num_lines)
    for step in range(1, num_lines + 1):
        folder.record({"loss": 1 / step, "eval_accuracy": step / 100}, step)
    if state != "running":
        folder.finish(state, step=num_lines, **facts)
    return folder


@pytest.mark.slow
def test_from_one_server_to_another(trimtab_command, store, server):
    run = make_run(Path("runs/mine/001"), 1_500).path
    code, out, _ = trimtab_command("track", "sync", run, "--to", f"sqlite:///{store}")
    assert code == 0
    assert f"run {run_id_of(run)}, FINISHED" in out
    first = run_id_of(run)
    assert rows_on(store, first) == rows_in(run)
    assert len(rows_in(run)) == 3_000
    assert trimtab_command("track", "sync", run, "--to", server.uri)[0] == 0
    second = run_id_of(run)
    assert rows_on(server.store, second) == rows_in(run)
    (there,) = [one for one in runs_on(server.store) if one["id"] == second]
    (here,) = runs_on(store)
    assert (there["status"], there["name"]) == ("FINISHED", "001")
    assert there["params"] == here["params"]
    assert there["params"]["data.train"] == "reviews.csv"
    assert there["tags"]["trimtab.run"] == here["tags"]["trimtab.run"]
    files = sorted(path.name for path in server.folder.glob(f"files/*/{second}/artifacts/*"))
    assert files == ["metrics.jsonl", "plan.json", "recipe.yaml"]
    assert trimtab_command("track", "sync", run)[0] == 0  # to the one used last; all is there, and stays so once
    assert [one["uri"] for one in tracking_of(run)["servers"]] == [f"sqlite:///{store}", server.uri]
    assert rows_on(server.store, second) == rows_in(run)


@pytest.mark.parametrize(
    ("state", "status", "error"),
    [
        ("finished", "FINISHED", None),
        ("stopped", "KILLED", None),
        ("failed", "FAILED", "ValueError: x"),
        ("killed", "FAILED", "killed: its process ended without reporting an error"),
        ("running", "RUNNING", None),
    ],
)
def test_how_it_ended(trimtab_command, store, state, status, error):
    facts = {"error": error} if state == "failed" else {}
    folder = make_run(Path("runs/mine/001"), 3, "running" if state == "killed" else state, **facts)
    if state == "killed":
        (folder.path / "run.lock").unlink()  # the process that held it is dead
    assert trimtab_command("track", "sync", folder.path, "--to", f"sqlite:///{store}")[0] == 0
    (run,) = runs_on(store)
    assert (run["status"], run["tags"].get("trimtab.error")) == (status, error)
    assert rows_on(store, run["id"]) == rows_in(folder.path)
    if state == "running":
        folder.finish("finished")
        assert trimtab_command("track", "sync", folder.path)[0] == 0
        assert runs_on(store)[0]["status"] == "FINISHED"


def test_the_local_store(trimtab_command, empty_store, tracked):
    shutil.copy(empty_store, Path("runs").mkdir() or Path("runs/mlflow.db"))
    run = make_run(Path("runs/mine/001"), 3, track="local").path
    assert trimtab_command("track", "sync", run)[0] == 0
    (found,) = runs_on(Path("runs/mlflow.db"))
    assert rows_on(Path("runs/mlflow.db"), found["id"]) == rows_in(run)
    assert Path("runs/mlartifacts", found["id"], "artifacts/recipe.yaml").is_file()


@pytest.mark.slow
def test_a_damaged_best_model_does_not_reach_the_server(trimtab_command, empty_store, tracked, tiny):
    shutil.copy(empty_store, Path("runs").mkdir() or Path("runs/mlflow.db"))
    run = make_run(Path("runs/mine/001"), 3, track="local").path
    best = exported(run / "best", loud(tiny), CLASSIFIER, "classify", metrics={"accuracy": 0.7})
    noted = {"step": json.loads((best / "trimtab.json").read_text()).get("step"), "files": {"model.safetensors": ""}}
    (run / "run.json").write_text(json.dumps(read_status(run) | {"best_files": noted}))
    code, _, err = trimtab_command("track", "sync", run)
    assert code == 1
    assert "best/model.safetensors is damaged" in err
    assert "trimtab resume runs/mine/001" in err


@pytest.mark.slow
def test_mistakes_and_outages(trimtab_command, proxy):
    run = make_run(Path("runs/mine/001"), 3).path
    code, _, err = trimtab_command("track", "sync", "nowhere")
    assert (code, "nowhere is not a run" in err) == (2, True)
    code, _, err = trimtab_command("track", "sync", run)
    assert (code, "is not tracked" in err, "--to" in err) == (2, True, True)
    proxy.mode = "401"
    code, _, err = trimtab_command("track", "sync", run, "--to", proxy.uri)
    assert (code, "MLFLOW_TRACKING_TOKEN" in err) == (2, True)
    proxy.mode = "500"
    code, _, err = trimtab_command("track", "sync", run, "--to", proxy.uri)
    assert (code, err.startswith(f"error: {proxy.uri}: ")) == (1, True)
    code, _, err = trimtab_command("track", "sync", run, "--to", f"http://127.0.0.1:{free_port()}")
    assert (code, "Connection refused" in err) == (1, True)
    code, _, err = trimtab_command("ui", "nowhere")
    assert (code, "no tracked runs below nowhere" in err) == (2, True)


def test_the_page_of_a_server_is_its_own(trimtab_command, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://host:5000")
    code, out, _ = trimtab_command("ui")
    assert (code, "http://host:5000" in out) == (0, True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s3cr3t@host:5000/?token=s3cr3t")
    code, out, err = trimtab_command("ui")
    assert (code, "http://host:5000" in out, "s3cr3t" in out + err) == (0, True, False)


def test_a_port_that_does_not_exist(trimtab_command, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "postgresql://127.0.0.1/runs")
    code, _, err = trimtab_command("ui", "--port", 99999)
    assert (code, "port 99999 does not exist" in err) == (2, True)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_leaves_no_server(monkeypatch, how):
    start = subprocess.Popen
    monkeypatch.setattr(page.subprocess, "Popen", lambda command, **settings: start(["sleep", "600"], **settings))
    before = signal.getsignal(how)
    with (
        Path("log").open("w") as log,
        pytest.raises(KeyboardInterrupt),
        page._start_server("sqlite:///mlflow.db", 5000, log.fileno()) as server,
    ):
        signal.raise_signal(how)
    assert server.returncode == -signal.SIGTERM
    assert signal.getsignal(how) is before


@pytest.mark.slow
def test_a_page_that_cannot_start_says_why(trimtab_command, monkeypatch):
    """No database answers there, and its password is neither shown nor on a command line."""
    seen = []
    start = subprocess.Popen

    def noting(command, **settings):
        seen.append(" ".join(command))
        return start(command, **settings)

    monkeypatch.setattr(page.subprocess, "Popen", noting)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"postgresql://me:s3cr3t@127.0.0.1:{free_port()}/runs")
    code, out, err = trimtab_command("ui", "--port", free_port())
    assert (code, "mlflow server ended with" in err) == (1, True)
    assert "is ready" not in out
    assert "s3cr3t" not in out + err
    assert len(seen) == 1
    assert "s3cr3t" not in seen[0]


@pytest.mark.slow
def test_the_page(trimtab_command, empty_store, tracked):
    """MLflow's own, with the run and its files."""
    shutil.copy(empty_store, Path("runs").mkdir() or Path("runs/mlflow.db"))
    run = make_run(Path("runs/mine/001"), 3, track="local").path
    assert trimtab_command("track", "sync", run)[0] == 0
    port = free_port()
    command = [sys.executable, "-m", "trimtab", "ui", str(run), "--port", str(port)]  # a run's folder will do
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ)
    try:
        url = f"http://127.0.0.1:{port}"
        assert "starting" in shown.stdout.readline()
        assert f"{url} is ready" in shown.stdout.readline()  # it answers from now on
        with urllib.request.urlopen(
            f"{url}/get-artifact?path=recipe.yaml&run_uuid={run_id_of(run)}", timeout=100
        ) as got:
            assert got.read() == (run / "recipe.yaml").read_bytes()
        with urllib.request.urlopen(f"{url}/api/2.0/mlflow/runs/get?run_id={run_id_of(run)}", timeout=100) as got:
            assert json.load(got)["run"]["info"]["status"] == "FINISHED"
    finally:
        shown.send_signal(signal.SIGINT)
        said = shown.communicate(timeout=120)
    assert (shown.returncode, said) == (0, ("", ""))
