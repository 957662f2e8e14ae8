"""`Engine(log_with="mlflow")`: a loop of one's own is tracked like a recipe's run, by the verbs of Accelerate."""

import json
import shutil
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
from mlflow_servers import free_port, rows_in, rows_on, run_id_of, runs_on, wait_until

from tiny_runs import lines_of
from trimtab import Engine
from trimtab.build.tracking import sync_run
from trimtab.commands.report import make_page
from trimtab.errors import RecipeError
from trimtab.runs.run_folder import read_status, unfinished_run
from trimtab.tracking.mlflow.tracker import MlflowTracker
from trimtab.tracking.upload import uploader

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # mlflow's own use of sqlalchemy
    pytest.mark.usefixtures("own_folder"),
]

LOOP = """
import json, os, signal, sys, time
from pathlib import Path
from trimtab import Engine

engine = Engine(cpu=True, log_with="mlflow")
engine.init_trackers("colours", {"lr": 0.1}, init_kwargs={"mlflow": {"run_name": "mine"}})
tracking = engine.get_tracker("mlflow").folder / "tracking.json"
for step in range(1, 4):
    engine.log({"loss": 1 / step}, step=step)
while not tracking.exists() or not json.loads(tracking.read_text())["servers"]:
    time.sleep(0.05)
exec(sys.argv[1])
"""


@pytest.fixture
def local(own_folder, tracked, empty_store):
    """A store below `runs`, as there is one after the first run."""
    Path("runs").mkdir()
    return Path(shutil.copy(empty_store, "runs/mlflow.db"))


def test_a_loop_is_tracked(local):
    engine = Engine(cpu=True, log_with="mlflow")
    engine.init_trackers("colours", {"lr": 0.1, "model": {"layers": 2}, "out": Path("x")})
    tracker = engine.get_tracker("mlflow")
    for step in range(1, 31):
        engine.log({"loss": 1 / step, "note": "fine"}, step=step)
    engine.log({"total": 7})
    wait_until(lambda: tracker.run_id is not None)
    folder = tracker.folder
    engine.end_training()
    assert folder == Path("runs/colours/001")
    (run,) = runs_on(local)
    assert (run["id"], run["name"], run["status"]) == (run_id_of(folder), "001", "FINISHED")
    assert run["params"] == {"lr": "0.1", "model.layers": "2", "out": "x"}
    assert "torch" in run["tags"]["trimtab.versions"]
    assert rows_on(local, run["id"]) == rows_in(folder)
    assert len(rows_in(folder)) == 31
    assert list(Path("runs/mlartifacts", run["id"]).rglob("metrics.jsonl"))
    assert "[29,0.03448276],[30,0.03333333]" in make_page([folder])
    with pytest.raises(RecipeError, match="before init_trackers"):
        engine.log({"late": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "status", "error"),
    [
        ("raise ValueError('broken')", "FAILED", "ValueError: broken"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "FAILED", "killed"),
        ("raise KeyboardInterrupt", "KILLED", None),
        ("pass", "FINISHED", None),
    ],
)
def test_a_loop_that_does_not_reach_its_end(local, end, status, error):
    done = subprocess.run([sys.executable, "-c", LOOP, end], capture_output=True, text=True)
    assert "run is recorded as finished" in done.stderr + done.stdout or status != "FINISHED"
    wait_until(lambda: [run["status"] for run in runs_on(local)] == [status])
    (run,) = runs_on(local)
    found = run["tags"].get("trimtab.error")
    assert found is None if error is None else found.startswith(error)
    folder = Path("runs/colours/mine")
    assert rows_on(local, run["id"]) == rows_in(folder)
    assert len(rows_in(folder)) == 3
    assert unfinished_run(Path("runs/colours")) is None, "a recipe cannot resume it"


@pytest.mark.slow
def test_settings_and_a_run_that_goes_on(server):
    """Also the second life of a run, and a run within a run."""
    settings = {"uri": server.uri, "run_name": "mine", "tags": {"team": 7}, "description": "words"}
    engine = Engine(cpu=True, log_with=["mlflow"], project_dir="logs")

    def train(steps, **more):
        engine.init_trackers("colours", {"lr": 0.1}, init_kwargs={"mlflow": settings | more})
        folder = engine.get_tracker("mlflow").folder
        for step in steps:
            engine.log({"loss": 1 / step}, step=step)
        engine.end_training()
        return folder

    first = train(range(1, 6))
    again = train(range(4, 9), resume=True)
    other = train(range(1, 3), parent=run_id_of(first))
    assert (first, again, other) == (*[Path("logs/colours/mine")] * 2, Path("logs/colours/mine-2"))
    assert [line["step"] for line in lines_of(first)] == list(range(1, 9))
    runs = {run["id"]: run for run in runs_on(server.store)}
    assert rows_on(server.store, run_id_of(first)) == rows_in(first)
    assert rows_on(server.store, run_id_of(other)) == rows_in(other)
    run, nested = runs[run_id_of(first)], runs[run_id_of(other)]
    assert (run["name"], run["status"], run["tags"]["team"]) == ("mine", "FINISHED", "7")
    assert (nested["name"], nested["tags"]["mlflow.parentRunId"]) == ("mine", run["id"])
    assert run["tags"]["mlflow.note.content"] == "words"


def test_a_dead_server_costs_the_loop_nothing(monkeypatch, caplog, store):
    monkeypatch.setattr(uploader, "_END_S", 0.5)
    caplog.set_level("INFO", logger="trimtab")
    engine = Engine(cpu=True, log_with="mlflow", project_dir="logs")
    uri = f"http://127.0.0.1:{free_port()}"
    engine.init_trackers("colours", {"lr": 0.1}, init_kwargs={"mlflow": {"uri": uri}})
    engine.log({"loss": 1.0}, step=1)
    engine.end_training()
    assert "trimtab track sync logs/colours/001" in caplog.messages[-1]
    folder = Path("logs/colours/001")
    assert sync_run(folder, f"sqlite:///{store}").endswith("FINISHED")
    assert rows_on(store, run_id_of(folder)) == rows_in(folder)
    assert runs_on(store)[0]["params"] == {"lr": "0.1"}


def test_where_nothing_is_tracked_the_numbers_are_in_the_folder():
    """TRIMTAB_TRACK=none, as the tests have it; what was not tracked can be sent later."""
    engine = Engine(cpu=True, log_with="all", project_dir="logs")
    for _ in range(2):  # as in cross-validation; a run that is still open is over when the next begins
        engine.init_trackers("colours", {"lr": 0.1})
        engine.log({"loss": 1.0}, step=1)
    engine.end_training()
    engine.end_training()
    folders = [Path("logs/colours/001"), Path("logs/colours/002")]
    assert [[line["loss"] for line in lines_of(folder)] for folder in folders] == [[1.0], [1.0]]
    assert [read_status(folder)["state"] for folder in folders] == ["finished", "finished"]
    assert len(lines_of(Path("logs/colours"))) == 3, "one journal, with a config for each run"
    assert not list(Path("logs").rglob("tracking.*"))
    with pytest.raises(RecipeError, match="is not tracked"):
        sync_run(folders[0])


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"run_id": "abc"}, "resume=True"),
        ({"colour": "red"}, "has colour, which is not supported"),
        ({"resume": True}, "needs the name of the run"),
        ({"run_name": "a/b"}, "not a valid folder name"),
        ({"run_name": ".."}, "not a valid folder name"),
        ({"run_name": "a\nb"}, "not a valid folder name"),
        ({"nested_run": True}, "no run is active in mlflow"),
    ],
)
def test_mistakes(settings, match, monkeypatch):
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    engine = Engine(cpu=True, log_with="mlflow", project_dir="logs")
    with pytest.raises(RecipeError, match=match):
        engine.init_trackers("colours", init_kwargs={"mlflow": settings})
    assert not Path("logs").exists()


def test_a_run_of_a_recipe_is_left_alone():
    folder = Path("logs/colours/mine")
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"state": "failed", "step": 3}))
    engine = Engine(cpu=True, log_with="mlflow", project_dir="logs")
    with pytest.raises(RecipeError, match="is a run of a recipe"):
        engine.init_trackers("colours", init_kwargs={"mlflow": {"run_name": "mine", "resume": True}})


def test_names_and_objects():
    class LoggerType(Enum):
        MLFLOW = "mlflow"

    class Own:
        name = "own"

        def __init__(self):
            self.calls = []

        def set_up(self, **settings):
            self.calls.append(settings)

        def start(self, project_name, config):
            self.calls.append((project_name, config))

        def log(self, values, step=None):
            self.calls.append((values, step))

        def finish(self):
            self.calls.append("finish")

    own = Own()
    engine = Engine(cpu=True, log_with=[LoggerType.MLFLOW, own], project_dir="logs")
    assert isinstance(engine.get_tracker("mlflow"), MlflowTracker)
    engine.init_trackers("colours", {"lr": 1}, init_kwargs={"own": {"mode": "offline"}})
    engine.log({"loss": 1.0}, step=2)
    engine.end_training()
    assert own.calls == [{"mode": "offline"}, ("colours", {"lr": 1}), ({"loss": 1.0}, 2), "finish"]
    with pytest.raises(RecipeError, match="log_with='wandb' is not valid"):
        Engine(cpu=True, log_with="wandb")


def test_a_forked_child_leaves_the_run_to_its_parent():
    engine = Engine(cpu=True, log_with="mlflow", project_dir="logs")
    engine.init_trackers("colours")
    tracker = engine.get_tracker("mlflow")
    tracker._process_id += 1  # as in a forked child
    tracker._on_exit()
    assert read_status(tracker.folder)["state"] == "running"
    engine.end_training()
