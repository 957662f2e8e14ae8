"""A run is brought to a server, whatever the server does: afterwards it has exactly the rows of metrics.jsonl."""

import ast
import contextlib
import shutil
import sqlite3
import threading
import time

import pytest
from mlflow_servers import Proxy, acked_of, free_port, rows_in, rows_on, run_id_of, runs_on, tracking_of, wait_until

from small_disk import mounted
from trimtab.runs.run_folder import RunFolder
from trimtab.tracking.mlflow.server import Row, mlflow_settings
from trimtab.tracking.upload import process as ship_process
from trimtab.tracking.upload.attachment import About, Tracking
from trimtab.tracking.upload.journal_rows import rows_of
from trimtab.tracking.upload.process import Patience, ship
from trimtab.tracking.upload.server_history import RowsAhead
from trimtab.tracking.upload.shipper import _rises, flat_params, what_waits

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own use of sqlalchemy


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Everything as it is, but sooner."""
    monkeypatch.setattr(ship_process, "_EVERY_S", 0.1)
    monkeypatch.setattr(ship_process, "_FIRST_WAIT_S", 0.1)
    monkeypatch.setattr(ship_process, "_LONGEST_WAIT_S", 0.5)
    monkeypatch.setattr(ship_process, "_DYING_S", 0.2)


class Ears:
    """What the shipping is told of its training."""

    def __init__(self):
        self.is_over = self.is_orphan = False
        self._changed = threading.Event()

    def wait(self, seconds):
        self._changed.wait(seconds)
        self._changed.clear()

    def tell(self, **facts):
        vars(self).update(facts)
        self._changed.set()


class Mouth:
    """What it says."""

    def __init__(self):
        self.lines, self.messages = [], []

    def __call__(self, **message):
        self.messages.append(message)

    def say(self, text):
        self.lines.append(text)


class Run:
    """A run that writes numbers without training, and what ships it, on a thread."""

    def __init__(self, path, uri, **about):
        self.folder, self.uri = RunFolder(path), uri
        self.path = path
        (path / "recipe.yaml").write_text("model: tiny\n")
        self.folder.start({"train": {"lr": 0.1}, "model": "tiny"}, num_steps=1_000)
        self.about = About(name=path.name, experiment=path.parent.name, params=flat_params({"train": {"lr": 0.1}}))
        vars(self.about).update(about)
        self.step = 0
        self.ears, self.mouth = Ears(), Mouth()
        self._thread = None

    def ship(self):
        self.ears, self.mouth = Ears(), Mouth()
        self._thread = threading.Thread(
            target=ship, args=(self.path, self.uri, self.about, self.ears, self.mouth), daemon=True
        )
        self._thread.start()
        return self

    def write(self, num_lines, pause_s=0.0):
        for _ in range(num_lines):
            self.step += 1
            self.folder.record({"loss": 1 / self.step, "lr": 1e-5 * self.step, "text": "x"}, self.step)
            time.sleep(pause_s)

    def acked(self):
        """Whether all that was written is there."""
        found = Tracking.read(self.path)
        size = (self.path / "metrics.jsonl").stat().st_size
        return found is not None and any(one.acked == size for one in found.attachments)

    def end(self, state="finished", timeout_s=180.0, **facts):
        self.folder.finish(state, **facts)
        self.ears.tell(is_over=True)
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), self.mouth.lines
        return self

    def check(self, store):
        """The server has this run once, with exactly the rows of the journal."""
        run_id = run_id_of(self.path)
        assert rows_on(store, run_id) == rows_in(self.path)
        (run,) = [run for run in runs_on(store) if run["tags"].get("trimtab.run") == self.about.run]
        assert run["id"] == run_id
        return run


@pytest.fixture
def make_run(tmp_path):
    """Makes runs; mlflow is told not to wait for minutes, as in the process that ships."""
    with mlflow_settings():
        yield lambda uri, name="001", **about: Run(tmp_path / "runs" / "mine" / name, uri, **about)


def test_all_is_well(make_run, store):
    run = make_run(f"sqlite:///{store}", tags={"trimtab.hardware": "a machine"}).ship()
    run.write(30)
    run.folder.record({"loss": float("nan"), "norm": float("inf"), "top%1": 3, "parts": {"a": 1}, "ok": True}, 31)
    wait_until(run.acked)
    assert runs_on(store)[0]["status"] == "RUNNING"
    run.write(2_000)  # several batches
    found = run.end(step=2_030, peak_memory_bytes=77).check(store)
    assert len(rows_in(run.path)) == 2 * 2_030 + 4
    assert found["status"] == "FINISHED"
    assert found["params"] == {"train.lr": "0.1"}
    assert found["tags"]["trimtab.hardware"] == "a machine"
    assert found["tags"]["trimtab.peak_memory_bytes"] == "77"
    assert len(found["tags"]["mlflow.source.git.commit"]) == 40
    files = store.parent / "mlartifacts" / found["id"] / "artifacts"
    assert sorted(file.name for file in files.iterdir()) == ["metrics.jsonl", "recipe.yaml"]
    assert (files / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()
    assert run.mouth.lines == ["the metric 'top%1' is 'top_1' on the tracking server"]
    assert run.mouth.messages[-1] == {"done": True}
    assert str(what_waits(Tracking.read(run.path), run.uri, with_model=True)) == ""


@pytest.mark.parametrize(
    "mode", ["500", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("hang", "deaf", "401"))]
)
def test_a_server_that_fails_in_the_middle(make_run, server, proxy, mode, monkeypatch):
    run = make_run(proxy.uri).ship()
    run.write(20)
    wait_until(run.acked)
    proxy.mode, before = mode, proxy.num_requests
    with monkeypatch.context() as impatient:
        if mode == "hang":  # only then: on a busy machine a server may take seconds to answer
            impatient.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        run.write(20)
        wait_until(lambda: proxy.num_requests >= before + 2 and run.mouth.lines)
    run.write(20)
    proxy.mode = "pass"
    wait_until(run.acked)
    assert run.end().check(server.store)["status"] == "FINISHED"
    begins, ends = run.mouth.lines  # one line when it begins, one when it is over
    assert "training goes on" in begins
    assert ("MLFLOW_TRACKING_TOKEN" in begins) == (mode == "401")
    assert ends == f"tracking: {proxy.uri} is back"


@pytest.mark.parametrize("mode", [pytest.param("500", marks=pytest.mark.slow), "deaf"])
def test_a_server_that_fails_from_the_start(make_run, server, proxy, mode):
    """Also where the run was made, and the answer got lost: it is not made twice."""
    proxy.mode = mode
    run = make_run(proxy.uri).ship()
    run.write(20)
    wait_until(lambda: proxy.num_requests >= 3)
    proxy.mode = "pass"
    time.sleep(0.3)
    proxy.mode = mode  # perhaps between two requests of one batch
    time.sleep(0.3)
    proxy.mode = "pass"
    assert run.end().check(server.store)["status"] == "FINISHED"


def test_a_server_that_is_not_there_yet(make_run, server):
    port = free_port()
    run = make_run(f"http://127.0.0.1:{port}").ship()
    run.write(20)
    wait_until(lambda: run.mouth.lines)
    assert "Connection refused" in run.mouth.lines[0]
    assert run.mouth.messages[1:].count({"progress": True}) == 0  # after the import of mlflow
    proxy = Proxy(server.port, port)
    try:
        run.write(20)
        assert run.end().check(server.store)["status"] == "FINISHED"
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(make_run, server):
    run = make_run(server.uri).ship()
    writer = threading.Thread(target=run.write, args=(200, 0.02))
    writer.start()
    wait_until(lambda: run.step > 10 and acked_of(run.path))
    server.kill()
    server.start()  # takes seconds
    writer.join()
    wait_until(run.acked)
    assert run.end().check(server.store)["status"] == "FINISHED"
    assert len(rows_in(run.path)) == 400
    begins, ends = run.mouth.lines
    assert "training goes on" in begins
    assert ends == f"tracking: {server.uri} is back"


@pytest.mark.slow
def test_a_store_that_another_program_locks(make_run, store):
    run = make_run(f"sqlite:///{store}").ship()
    run.write(20)
    wait_until(run.acked)
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("begin exclusive")
        run.write(20)
        time.sleep(1.0)
        assert not run.acked()
        other.execute("rollback")
    wait_until(run.acked)
    assert run.end().check(store)["status"] == "FINISHED"


@pytest.mark.slow
def test_a_store_that_is_locked_for_longer_than_mlflow_waits(make_run, store):
    run = make_run(f"sqlite:///{store}").ship()
    run.write(20)
    wait_until(run.acked)
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("begin exclusive")
        run.write(20)
        wait_until(lambda: run.mouth.lines)
        assert "is locked by another program" in run.mouth.lines[0]
        other.execute("rollback")
    assert run.end().check(store)["status"] == "FINISHED"


def test_no_room_for_files(make_run, store):
    """Numbers and state are there; the files are sent when there is room, and counted until then."""
    with mounted(store.parent / "mlartifacts", "100k") as disk:
        (disk / "filler").write_bytes(b"x" * 90_000)
        run = make_run(f"sqlite:///{store}").ship()
        run.write(300)
        wait_until(run.acked)
        run.folder.finish("finished")
        run.ears.tell(is_over=True)
        wait_until(lambda: tracking_of(run.path)["servers"][0]["status"] == "FINISHED")
        assert run.check(store)["status"] == "FINISHED"
        assert any("metrics.jsonl: No space left on device" in line for line in run.mouth.lines)
        assert "metrics.jsonl" in str(what_waits(Tracking.read(run.path), run.uri, with_model=False))
        (disk / "filler").unlink()
        run._thread.join(180)
        assert run.mouth.messages[-1] == {"done": True}
        files = disk / run_id_of(run.path) / "artifacts"
        assert (files / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_a_run_that_goes_on_is_the_same_run(make_run, store):
    run = make_run(f"sqlite:///{store}").ship()
    run.write(20)
    run.end("stopped", stop_reason="SIGTERM")
    assert run.check(store)["status"] == "KILLED"
    position = (run.path / "metrics.jsonl").stat().st_size
    run.folder = RunFolder(run.path, goes_on=True)
    run.folder.start({}, 1_000, position, run.step)
    run.about = About(name="001", experiment="mine", params={"train.lr": "0.2", "new": "1"})  # as a new process has it
    run.ship()
    run.write(20)
    wait_until(run.acked)
    (found,) = runs_on(store)
    assert (found["status"], found["params"]) == ("RUNNING", {"train.lr": "0.1", "new": "1"})
    assert found["tags"]["trimtab.changed"] == "train.lr: 0.1 → 0.2"
    run.end("failed", error="ValueError: broken")
    (found,) = runs_on(store)
    assert (found["status"], found["tags"]["trimtab.error"]) == ("FAILED", "ValueError: broken")
    assert rows_on(store, found["id"]) == rows_in(run.path)
    run.folder = RunFolder(run.path, goes_on=True)
    run.folder.start({}, 1_000, (run.path / "metrics.jsonl").stat().st_size, run.step)
    run.ship().end()
    (found,) = runs_on(store)
    assert found["status"] == "FINISHED"
    assert "trimtab.error" not in found["tags"]


def test_a_training_that_is_gone_leaves_a_run_that_failed(make_run, store):
    run = make_run(f"sqlite:///{store}").ship()
    run.write(20)
    wait_until(run.acked)
    (run.path / "run.lock").unlink()  # the process that held it is dead
    run.ears.tell(is_orphan=True)
    run._thread.join(180)
    (found,) = runs_on(store)
    assert found["status"] == "FAILED"
    assert found["tags"]["trimtab.error"].startswith("killed")


def test_the_next_run_closes_those_that_were_killed(make_run, store):
    killed, alive = make_run(f"sqlite:///{store}", "killed").ship(), make_run(f"sqlite:///{store}", "alive").ship()
    for run in (killed, alive):
        run.write(5)
        wait_until(run.acked)
        run.ears.tell(is_orphan=True)
        run._thread.join(180)
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("update runs set status = 'RUNNING'")
        database.commit()
    for run in (killed, alive):
        tracking = Tracking.read(run.path)
        tracking.attachments[-1].status = "RUNNING"
        tracking.write()
    (killed.path / "run.lock").unlink()
    make_run(f"sqlite:///{store}", "next").ship().end()
    assert {run["name"]: run["status"] for run in runs_on(store)} == {
        "killed": "FAILED",
        "alive": "RUNNING",
        "next": "FINISHED",
    }


def test_a_server_that_has_lost_the_run(make_run, store):
    run = make_run(f"sqlite:///{store}").ship()
    run.write(20)
    wait_until(run.acked)
    first = run_id_of(run.path)
    with contextlib.closing(sqlite3.connect(store)) as database:
        for table, key in (("metrics", "run_uuid"), ("latest_metrics", "run_uuid"), ("params", "run_uuid")):
            database.execute(f"delete from {table} where {key} = ?", (first,))
        database.execute("delete from tags where run_uuid = ?", (first,))
        database.execute("delete from runs where run_uuid = ?", (first,))
        database.commit()
    run.write(20)
    assert run.end().check(store)["id"] != first
    assert len(rows_in(run.path)) == 80


@pytest.mark.parametrize("knows", ["how far it was", "nothing"])
def test_a_folder_that_comes_back_from_an_older_copy(make_run, store, tmp_path, knows):
    """The server has steps that the copy does not have. They are taken again, twice, and are there once."""
    run = make_run(f"sqlite:///{store}").ship()

    def write(num_lines):
        for _ in range(num_lines):
            run.step += 1
            speed = {"tokens_per_s": time.monotonic()} if run.step % 2 else {}
            run.folder.record({"loss": 1 / run.step, "norm": float("inf"), **speed}, run.step)
        run.folder.record({"eval_loss": float("nan")}, run.step)

    def go_on_from(copy):
        run.ears.tell(is_orphan=True)
        run._thread.join(180)
        run.folder._journal.finish()
        run.folder._let_go()
        shutil.rmtree(run.path)
        shutil.copytree(copy, run.path)
        run.folder = RunFolder(run.path, goes_on=True)
        run.step = 10
        run.folder.start({}, 1_000, position, run.step)
        run.ship()

    write(10)
    position = (run.path / "metrics.jsonl").stat().st_size
    wait_until(run.acked)
    write(4)
    wait_until(run.acked)
    shutil.copytree(run.path, tmp_path / "copy")
    if knows == "nothing":
        (tmp_path / "copy" / "tracking.json").unlink()
    write(10)
    wait_until(run.acked)
    go_on_from(tmp_path / "copy")
    write(4)
    write(5)  # of 10 that the server has
    wait_until(run.acked)
    first = 1 if knows == "nothing" else 15
    assert run.mouth.lines == [f"{run.uri} has numbers of steps {first}-24 already: they are not sent a second time"]
    shutil.copytree(run.path, tmp_path / "later")
    go_on_from(tmp_path / "later")
    write(4)
    write(10)
    write(5)
    run.end()
    assert (len(runs_on(store)), tracking_of(run.path)["servers"][0]["ahead_since_ms"]) == (1, None)
    there, here = ([ast.literal_eval(row)[:2] for row in rows] for rows in (stored(run, store), rows_in(run.path)))
    assert sorted(there) == sorted(set(there))
    assert sorted(there) == sorted(set(here))


def stored(run, store):
    return rows_on(store, run_id_of(run.path))


def test_other_numbers_of_steps_that_are_taken_again_are_sent():
    ahead = RowsAhead([Row("loss", 1.0, 10, 1), Row("lr", 0.1, 10, 1), Row("tokens_per_s", 7, 10, 1)])
    other = [Row("loss", 2.0, 20, 1), Row("lr", 0.2, 20, 1), Row("tokens_per_s", 9, 20, 1)]
    assert ahead.without(other) == other
    assert ahead.without([Row("loss", 1.0, 30, 1), Row("lr", 0.2, 30, 1), Row("tokens_per_s", 8, 30, 1)]) == [
        Row("lr", 0.2, 30, 1)
    ]
    assert ahead.without([Row("loss", 1.0, 40, 1)]) == [Row("loss", 1.0, 40, 1)], "it was there once"
    assert ahead.steps == [1]
    assert ahead
    assert not RowsAhead()


def test_whether_more_is_better():
    assert _rises("accuracy", About(), {})
    assert not _rises("mse", About(), {})
    assert not _rises("perplexity", About(), {})
    assert _rises("joy", About(), {}) is None
    assert _rises("joy", About(), {"metric_name": "joy", "higher_is_better": False}) is False
    assert _rises("joy", About(), {"metric_name": "other", "higher_is_better": False}) is None
    assert _rises("joy", About(higher_is_better=True), {"metric_name": "joy", "higher_is_better": False})


def test_what_a_line_says():
    text = b'{"time": 1.5, "step": 3, "loss": "NaN", "a": 1, "note": "x", "ok": true, "none": null, "p": {"q": 2}}\n'
    rows = {row.key: row for row in rows_of(text)}
    assert set(rows) == {"loss", "a", "p/q"}
    assert (rows["a"].timestamp_ms, rows["a"].step, rows["a"].value) == (1_500, 3, 1.0)
    assert rows["loss"].value != rows["loss"].value
    for other in (b'{"time": 1, "config": {"lr": 1}}\n', b"{\n", b"[]\n", b'{"loss": 1}\n'):
        assert rows_of(other) == []


def test_waiting_grows_and_is_said_once(monkeypatch):
    from trimtab.tracking.mlflow.server import Trouble

    monkeypatch.setattr(ship_process, "_FIRST_WAIT_S", 1.0)
    monkeypatch.setattr(ship_process, "_LONGEST_WAIT_S", 60.0)
    said = []
    patience = Patience(said.append, "it waits", "it is back")
    waits = []
    for _ in range(9):
        patience.note([Trouble("away", "no answer")])
        waits.append(patience.wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    patience.note([])
    patience.note([])
    assert said == ["tracking: no answer; it waits", "tracking: it is back"]
    patience.note([Trouble("denied", "no", "do this")])
    assert patience.wait_s == 10
