"""Real trainings with their uploader process: a kill or a dead server costs nothing."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from mlflow_servers import free_port, rows_in, rows_on, run_id_of, runs_on, tracking_of, wait_until

from tiny_runs import lines_of, reproducible_lines, reviews, write_csv
from trimtab import Recipe, fit
from trimtab.build.tracking import sync_run
from trimtab.errors import RecipeError, TrimtabError, UserError
from trimtab.run import resume
from trimtab.runs.journal import VOLATILE_KEYS
from trimtab.runs.run_folder import RunFolder, find_run
from trimtab.runs.tracking_file import RunDescription
from trimtab.tracking.upload import uploader
from trimtab.tracking.upload.uploader import MlflowUploader

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own use of sqlalchemy
    pytest.mark.usefixtures("own_folder", "tracked"),
]

KILLED = """
import json, os, signal, sys, time
from pathlib import Path
from trimtab import Recipe, fit

class Killer:
    def on_step(self, state):
        if state.step == 10:  # once the server has numbers of steps after the last saved state, which is that of step 6
            size = (Path(sys.argv[2]) / "metrics.jsonl").stat().st_size
            tracking, deadline, acked = Path(sys.argv[2]) / "tracking.json", time.time() + 180, 0
            while acked < size:
                assert time.time() < deadline
                time.sleep(0.05)
                servers = json.loads(tracking.read_text())["servers"] if tracking.exists() else []
                acked = max((server["acked"] for server in servers), default=0)
            os.kill(os.getpid(), int(sys.argv[3]))

fit(Recipe(**json.loads(sys.argv[1])), callbacks=[Killer()], progress="quiet")
"""


@pytest.fixture
def recipe(own_folder, tiny, empty_store):
    """A short training below `runs`, where a store is already."""
    Path("runs").mkdir()
    shutil.copy(empty_store, "runs/mlflow.db")
    data = str(write_csv(Path("reviews.csv"), reviews(100)))

    def make(**changes):
        settings = {
            "model": tiny.folder("bert"),
            "data": {"train": data},
            "train": {"max_steps": 12, "log_every": 1, "batch_size": 4},
            "checkpoint": {"every": "6 steps"},
            "evaluate": {"every": "4 steps"},
            "track": {"experiment": "mine", "log_model": False},
        }
        return settings | changes

    return make


STORE, FOLDER = Path("runs/mlflow.db"), Path("runs/mine/001")


def the_run():
    (run,) = runs_on(STORE)
    return run


@pytest.mark.slow
def test_a_training_is_tracked(recipe, caplog):
    caplog.set_level("INFO", logger="trimtab")
    result = fit(Recipe(**recipe(track={"experiment": "mine", "register_as": "reviews"})), progress="quiet")
    run = the_run()
    assert (run["status"], run["name"], run["id"]) == ("FINISHED", "001", run_id_of(result.folder))
    assert rows_on(STORE, run["id"]) == rows_in(result.folder)
    assert len(rows_in(result.folder)) > 60
    assert run["params"]["train.max_steps"] == "12"
    assert run["tags"]["trimtab.num_tokens"] == str(result.fit.num_tokens)
    assert "rows, crc32" in run["tags"]["trimtab.data.train"]
    assert "torch" in run["tags"]["trimtab.versions"]
    assert len(list(Path("runs/mlartifacts/models").glob("*/artifacts/MLmodel"))) == 1
    (page,) = Path("runs/mlartifacts").rglob("report.html")
    assert page.read_bytes() == (result.folder / "report.html").read_bytes()
    assert any(line.startswith("reviews: version 1 is best") for line in caplog.messages)
    assert json.loads((result.folder / "run.json").read_text())["higher_is_better"] is True
    assert not (result.folder / "tracking.log").exists()
    assert not [line for line in caplog.messages if line.startswith("tracking:") or "track sync" in line]


def train_and_signal(settings, number):
    """Train in a subprocess that sends itself a signal after step 10; return its exit code."""
    command = [sys.executable, "-c", KILLED, json.dumps(settings), str(FOLDER), str(int(number))]
    return subprocess.run(command, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "status"),
    [(signal.SIGKILL, -signal.SIGKILL, "FAILED"), (signal.SIGTERM, 75, "KILLED")],
)
def test_stopped_and_resumed_it_is_one_run(recipe, number, code, status):
    """Metrics of steps that are repeated are on the server already: they are neither lost nor there twice."""
    whole = fit(Recipe(**recipe(track="none", out="whole")), progress="quiet")
    assert train_and_signal(recipe(), number) == code
    wait_until(lambda: the_run()["status"] == status)  # after a kill, set by the uploader
    run = the_run()
    assert run["tags"].get("trimtab.error", "killed").startswith("killed")
    assert max(line["step"] for line in lines_of(FOLDER)) == 10
    kept = (FOLDER / "metrics.jsonl").read_bytes()
    assert resume(FOLDER, progress="quiet").fit.step == 12
    after = the_run()
    assert (after["id"], after["status"]) == (run["id"], "FINISHED")
    assert "trimtab.error" not in after["tags"]
    assert rows_on(STORE, run["id"]) == rows_in(FOLDER)
    assert (FOLDER / "metrics.jsonl").read_bytes().startswith(kept)
    assert set(Counter((line["step"], *sorted(line)) for line in lines_of(FOLDER)).values()) == {1}
    assert reproducible_lines(FOLDER) == reproducible_lines(whole.folder)


@pytest.mark.slow
def test_a_dead_server_costs_a_line_and_nothing_else(recipe, store, caplog, monkeypatch):
    monkeypatch.setattr(uploader, "_END_S", 3600.0)  # which is for a server that was there: longer than tests may take
    caplog.set_level("INFO", logger="trimtab")
    uri = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)

    class Patient:
        def on_step(self, state):
            if state.step == 3:
                wait_until(lambda: any(line.startswith("tracking: ") for line in caplog.messages))

    settings = recipe(track={"uri": "local", "log_model": False})
    result = fit(Recipe(**settings), progress="quiet", callbacks=[Patient()])
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert result.fit.step == 12
    said = [line for line in caplog.messages if uri in line]
    assert said[0] == f"tracking: {uri}: Connection refused; training continues, metrics are kept in the run folder"
    missing = (
        rf"not uploaded to {uri} yet: \d+ lines of metrics and .+; upload later: trimtab track sync runs/reviews/001"
    )
    assert re.fullmatch(missing, said[-1])
    assert len(said) <= 3  # and perhaps one about the remaining upload
    with pytest.raises(TrimtabError, match=rf"{uri}: Connection refused\n  cure: repeat the command when") as outage:
        sync_run(result.folder)  # knows which server was meant
    assert not isinstance(outage.value, UserError)
    with pytest.raises(RecipeError, match="'banana' is not the address of a tracking server"):
        sync_run(result.folder, "banana")
    assert sync_run(result.folder, f"sqlite:///{store}").endswith("FINISHED")
    assert rows_on(store, run_id_of(result.folder)) == rows_in(result.folder)


@pytest.mark.slow
def test_a_training_that_fails(recipe):
    class Broken:
        def on_step(self, state):
            if state.step == 3:
                raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fit(Recipe(**recipe()), progress="quiet", callbacks=[Broken()])
    run = the_run()
    assert (run["status"], run["tags"]["trimtab.error"]) == ("FAILED", "ValueError: broken")
    assert rows_on(STORE, run["id"]) == rows_in(FOLDER)


@pytest.mark.slow
def test_a_run_that_comes_back_from_its_mirror_is_still_one_run(recipe):
    """Its folder is lost, and with it what it knew of the server, which has more steps than the mirror."""
    settings = recipe(checkpoint={"every": "6 steps", "mirror": "drive"})
    assert train_and_signal(settings, signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: the_run()["status"] == "FAILED")
    run_id = the_run()["id"]
    first = numbers_of(rows_on(STORE, run_id))
    assert max(step for _, step, _ in first) == 10
    shutil.rmtree(FOLDER)
    result = resume(Path("drive/mine/001"), progress="quiet")
    assert result.folder == FOLDER
    assert max(line["step"] for line in lines_of(Path("drive/mine/001"))) == 12
    assert (the_run()["id"], the_run()["status"]) == (run_id, "FINISHED")
    there = numbers_of(rows_on(STORE, run_id))
    assert there == numbers_of(rows_in(FOLDER))
    assert set(Counter((key, step) for key, step, _ in there).values()) == {1}
    assert set(first) < set(there)


def numbers_of(rows):
    """Rows without the moment at which they were written."""
    found = [ast.literal_eval(row) for row in rows]
    return sorted((key, step, None if key in VOLATILE_KEYS else value) for key, step, _, value in found)


@pytest.mark.slow
def test_resumed_with_another_server_the_whole_history_is_there(recipe, server):
    fit(Recipe(**recipe()), progress="quiet")
    resume(FOLDER, progress="quiet", sets=[f"track.uri={server.uri}", "train.max_steps=16"])
    assert len(tracking_of(FOLDER)["servers"]) == 2
    assert rows_on(server.store, run_id_of(FOLDER)) == rows_in(FOLDER)
    assert max(line["step"] for line in lines_of(FOLDER)) == 16


def test_nothing_is_tracked_where_nothing_is_wanted(recipe):
    fit(Recipe(**recipe(track="none")), progress="quiet")
    fit(Recipe(**recipe(limits={"fast_dev_run": True})), progress="quiet")
    assert runs_on(STORE) == []
    assert not list(Path("runs").rglob("tracking.*"))


def test_an_uploader_that_dies_is_reported_and_nothing_waits_for_it(tmp_path, caplog, monkeypatch):
    """The process that is started here never writes a message."""
    caplog.set_level("INFO", logger="trimtab")
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 3600\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    folder = RunFolder(tmp_path / "run")
    folder.start({}, 1)
    upload = MlflowUploader(folder.path, "sqlite:////proc/nowhere/mlflow.db", RunDescription(name="run"), end_s=1.0)
    folder.track(upload)
    os.kill(upload._process.pid, signal.SIGKILL)
    wait_until(lambda: any("the uploader process has died" in line for line in caplog.messages))
    folder.record({"loss": 1.0}, 1)
    folder.finish("finished")
    assert any("trimtab track sync" in line for line in caplog.messages)


def test_ctrl_c_during_the_last_upload_skips_it_and_the_run_has_finished(tmp_path, caplog, monkeypatch):
    """The process that is started here never writes a message, as one of a server that hangs."""
    caplog.set_level("INFO", logger="trimtab")
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 3600\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    folder = RunFolder(tmp_path / "my run")
    folder.start({}, 1)
    upload = MlflowUploader(folder.path, "http://127.0.0.1:1", RunDescription(name="run"))
    folder.track(upload)
    process = upload._process
    monkeypatch.setattr(upload._messages, "get", lambda timeout: signal.raise_signal(signal.SIGINT))
    folder.finish("finished")
    assert process.poll() is not None
    assert caplog.messages[-2] == "the upload was interrupted"
    assert caplog.messages[-1].endswith(f"yet: trimtab track sync '{folder.path}'")
    assert find_run(folder.path)["state"] == "finished"
    RunFolder(folder.path, resumes=True).give_up()  # its lock was released
