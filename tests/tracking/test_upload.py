"""A run is uploaded whatever the server does: afterwards the server has exactly the rows of metrics.jsonl."""

import ast
import contextlib
import errno
import shutil
import sqlite3
import threading
import time

import pytest
from mlflow_servers import Proxy, acked_of, free_port, rows_in, rows_on, run_id_of, runs_on, tracking_of, wait_until

from small_disk import mounted
from trimtab.checkpoint.disk_errors import failed_path
from trimtab.runs.journal import JournalMark
from trimtab.runs.run_folder import RunFolder
from trimtab.runs.tracking_file import RunDescription, Tracking
from trimtab.tracking.mlflow.server import Row, UploadFailure, describe_failure, mlflow_environment
from trimtab.tracking.upload import process
from trimtab.tracking.upload.metric_rows import rows_of
from trimtab.tracking.upload.process import Backoff, upload_until_over
from trimtab.tracking.upload.run_upload import _is_higher_better, describe_missing, flatten_params
from trimtab.tracking.upload.server_history import RowsAhead

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # mlflow's own use of sqlalchemy


@pytest.fixture
def short_waits(monkeypatch):
    for name, seconds in {"_EVERY_S": 0.1, "_FIRST_WAIT_S": 0.1, "_LONGEST_WAIT_S": 0.5, "_DYING_S": 0.2}.items():
        monkeypatch.setattr(process, name, seconds)


class Parent:
    """The training process, as the uploader sees it."""

    def __init__(self, **facts):
        self.is_over = self.is_orphan = False
        self._changed = threading.Event()
        self.set(**facts)

    def wait(self, seconds):
        self._changed.wait(seconds)
        self._changed.clear()

    def set(self, **facts):
        vars(self).update(facts)
        self._changed.set()


class Writer:
    """Collects the messages of the uploader."""

    def __init__(self):
        self.lines, self.messages = [], []

    def __call__(self, **message):
        self.messages.append(message)

    def say(self, text):
        self.lines.append(text)


class Run:
    """A run that writes metrics without training, and its uploader on a thread."""

    def __init__(self, path, uri, **about):
        self.path, self.uri = path, uri
        self.folder = RunFolder(path)
        (path / "recipe.yaml").write_text("model: tiny\n")
        self.folder.start({"train": {"lr": 0.1}, "model": "tiny"}, num_steps=1_000)
        self.about = RunDescription(
            name=path.name, experiment=path.parent.name, params=flatten_params({"train": {"lr": 0.1}})
        )
        vars(self.about).update(about)
        self.step = 0

    def upload(self):
        self.parent, self.writer = Parent(), Writer()
        arguments = (self.path, self.uri, self.about, self.parent, self.writer)
        self._thread = threading.Thread(target=upload_until_over, args=arguments, daemon=True)
        self._thread.start()
        return self

    def write(self, num_lines, pause_s=0.0):
        for _ in range(num_lines):
            self.step += 1
            self.folder.record({"loss": 1 / self.step, "lr": 1e-5 * self.step, "text": "x"}, self.step)
            time.sleep(pause_s)

    def is_acked(self):
        """Whether the server has every line."""
        return acked_of(self.path) == (self.path / "metrics.jsonl").stat().st_size

    def write_and_wait(self, num_lines):
        self.write(num_lines)
        wait_until(self.is_acked)

    def resume(self, position=None):
        self.folder = RunFolder(self.path, resumes=True)
        size = (self.path / "metrics.jsonl").stat().st_size
        self.folder.start({}, 1_000, JournalMark(size if position is None else position), self.step)
        return self.upload()

    def join(self, **facts):
        """Tell the uploader the state of the training, and wait until it has exited."""
        self.parent.set(**facts)
        self._thread.join(180)
        assert not self._thread.is_alive(), self.writer.lines

    def end(self, state="finished", **facts):
        self.folder.finish(state, **facts)
        self.join(is_over=True)
        return self

    def check(self, store, status="FINISHED"):
        """The server has this run once, with exactly the rows of the journal."""
        run_id = run_id_of(self.path)
        assert rows_on(store, run_id) == rows_in(self.path)
        (run,) = [run for run in runs_on(store) if run["tags"].get("trimtab.run") == self.about.run]
        assert (run["id"], run["status"]) == (run_id, status)
        return run

    def missing(self, with_model=True):
        return describe_missing(Tracking.read(self.path), self.uri, with_model=with_model)


@pytest.fixture
def make_run(tmp_path, short_waits):
    """Makes runs, with mlflow's settings as in the uploader process."""
    with mlflow_environment("sqlite:///"):
        yield lambda uri, name="001", **about: Run(tmp_path / "runs" / "mine" / name, uri, **about)


@pytest.fixture
def run(make_run, store):
    """A run on a sqlite store, whose upload has started."""
    return make_run(f"sqlite:///{store}", tags={"trimtab.hardware": "a machine"}).upload()


def test_all_is_well(run, store):
    run.write(30)
    run.folder.record({"loss": float("nan"), "norm": float("inf"), "top%1": 3, "parts": {"a": 1}, "ok": True}, 31)
    wait_until(run.is_acked)
    assert runs_on(store)[0]["status"] == "RUNNING"
    run.write(2_000)  # several batches
    found = run.end(step=2_030, peak_memory_bytes=77).check(store)
    assert len(rows_in(run.path)) == 2 * 2_030 + 4
    assert found["params"] == {"train.lr": "0.1"}
    assert found["tags"]["trimtab.hardware"] == "a machine"
    assert found["tags"]["trimtab.peak_memory_bytes"] == "77"
    assert len(found["tags"]["mlflow.source.git.commit"]) == 40
    files = store.parent / "mlartifacts" / found["id"] / "artifacts"
    assert sorted(file.name for file in files.iterdir()) == ["metrics.jsonl", "recipe.yaml"]
    assert (files / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()
    assert run.writer.lines == ["the metric 'top%1' is named 'top_1' on the tracking server"]
    assert run.writer.messages[-1] == {"done": True}
    assert run.missing() == ""


def assert_one_outage(run, uri):
    """One line when it begins, one when it is over."""
    begins, ends = run.writer.lines
    assert "training continues" in begins
    assert ends == f"tracking: {uri} is back"


@pytest.mark.parametrize(
    "mode", ["500", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("hang", "deaf", "401"))]
)
def test_a_server_that_fails_in_the_middle(make_run, server, proxy, mode, monkeypatch):
    run = make_run(proxy.uri).upload()
    run.write_and_wait(20)
    proxy.mode, before = mode, proxy.num_requests
    with monkeypatch.context() as patch:
        if mode == "hang":  # only then: on a busy machine a server may take seconds to answer
            patch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
        run.write(20)
        wait_until(lambda: proxy.num_requests >= before + 2 and run.writer.lines)
    run.write(20)
    proxy.mode = "pass"
    wait_until(run.is_acked)
    run.end().check(server.store)
    assert_one_outage(run, proxy.uri)
    assert ("MLFLOW_TRACKING_TOKEN" in run.writer.lines[0]) == (mode == "401")


def test_a_server_that_does_not_answer_at_the_start(make_run, server, proxy):
    """The run is created and the response lost: it is not created twice."""
    proxy.mode = "deaf"
    run = make_run(proxy.uri).upload()
    run.write(20)
    wait_until(lambda: proxy.num_requests >= 3)
    for mode in ("pass", "deaf", "pass"):  # perhaps between two requests of one batch
        proxy.mode = mode
        time.sleep(0.3)
    run.end().check(server.store)


def test_a_server_that_is_not_there_yet(make_run, server):
    port = free_port()
    run = make_run(f"http://127.0.0.1:{port}").upload()
    run.write(20)
    wait_until(lambda: run.writer.lines)
    assert "Connection refused" in run.writer.lines[0]
    assert run.writer.messages[1:].count({"progress": True}) == 0  # after the import of mlflow
    proxy = Proxy(server.port, port)
    try:
        run.write(20)
        run.end().check(server.store)
    finally:
        proxy.close()


@pytest.mark.slow
def test_a_server_that_is_killed_and_started_again(make_run, server):
    run = make_run(server.uri).upload()
    writer = threading.Thread(target=run.write, args=(200, 0.02))
    writer.start()
    wait_until(lambda: run.step > 10 and acked_of(run.path))
    server.kill()
    server.start()  # takes seconds
    writer.join()
    wait_until(run.is_acked)
    run.end().check(server.store)
    assert len(rows_in(run.path)) == 400
    assert_one_outage(run, server.uri)


@pytest.mark.slow
def test_a_store_that_is_locked_for_longer_than_mlflow_waits(run, store):
    run.write_and_wait(20)
    with contextlib.closing(sqlite3.connect(store, isolation_level=None)) as other:
        other.execute("begin exclusive")
        run.write(20)
        wait_until(lambda: run.writer.lines)
        assert "is locked by another program" in run.writer.lines[0]
        other.execute("rollback")
    run.end().check(store)


def test_no_room_for_files(make_run, store):
    """Metrics and status are uploaded; files are reported as missing until there is room."""
    with mounted(store.parent / "mlartifacts", "100k") as disk:
        (disk / "filler").write_bytes(b"x" * 90_000)
        run = make_run(f"sqlite:///{store}").upload()
        run.write_and_wait(300)
        run.folder.finish("finished")
        run.parent.set(is_over=True)
        wait_until(lambda: tracking_of(run.path)["servers"][0]["status"] == "FINISHED")
        run.check(store)
        assert any("metrics.jsonl: No space left on device" in line for line in run.writer.lines)
        assert "metrics.jsonl" in run.missing()
        (disk / "filler").unlink()
        run.join()
        assert run.writer.messages[-1] == {"done": True}
        files = disk / run_id_of(run.path) / "artifacts"
        assert (files / "metrics.jsonl").read_bytes() == (run.path / "metrics.jsonl").read_bytes()


def test_a_resumed_run_is_the_same_run(run, store):
    run.write(20)
    run.end("stopped", stop_reason="SIGTERM").check(store, "KILLED")
    token = run.about.run
    run.about = RunDescription(
        name="001", experiment="mine", params={"train.lr": "0.2", "new": "1"}
    )  # as a new process has it
    run.resume().write_and_wait(20)
    (found,) = runs_on(store)
    assert (found["status"], found["params"]) == ("RUNNING", {"train.lr": "0.1", "new": "1"})
    assert found["tags"]["trimtab.changed"] == "train.lr: 0.1 → 0.2"
    run.about.run = token
    assert run.end("failed", error="ValueError: broken").check(store, "FAILED")["tags"]["trimtab.error"] == (
        "ValueError: broken"
    )
    assert "trimtab.error" not in run.resume().end().check(store)["tags"]


def test_killed_runs_are_closed_by_their_uploader_or_by_the_next_run(make_run, store):
    killed, alive = (make_run(f"sqlite:///{store}", name).upload() for name in ("killed", "alive"))
    for run in (killed, alive):
        run.write_and_wait(5)
    (killed.path / "run.lock").unlink()  # the process that held it is dead
    for run in (killed, alive):
        run.join(is_orphan=True)
    tags = killed.check(store, "FAILED")["tags"]
    assert tags["trimtab.error"].startswith("killed")
    with contextlib.closing(sqlite3.connect(store)) as database:  # as if the uploaders had been killed too
        database.execute("update runs set status = 'RUNNING'")
        database.commit()
    for run in (killed, alive):
        tracking = Tracking.read(run.path)
        tracking.servers[-1].status = "RUNNING"
        tracking.write()
    make_run(f"sqlite:///{store}", "next").upload().end()
    statuses = {run["name"]: run["status"] for run in runs_on(store)}
    assert statuses == {"killed": "FAILED", "alive": "RUNNING", "next": "FINISHED"}


def test_a_process_that_dies_after_its_run_has_ended(run, store):
    """It may have been generating samples for the report."""
    run.write_and_wait(5)
    (run.path / "report.html").write_text("a page")
    run.folder.finish("finished")
    run.join(is_orphan=True)
    run.check(store)
    tracking = Tracking.read(run.path)
    assert {"report.html", "metrics.jsonl", "recipe.yaml"} <= tracking.servers[-1].artifacts.keys()
    assert describe_missing(tracking, run.uri, with_model=True) == ""


def test_a_server_that_has_lost_the_run(run, store):
    run.write_and_wait(20)
    first = run_id_of(run.path)
    with contextlib.closing(sqlite3.connect(store)) as database:
        for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
            database.execute(f"delete from {table} where run_uuid = ?", (first,))
        database.commit()
    run.write(20)
    assert run.end().check(store)["id"] != first
    assert len(rows_in(run.path)) == 80


@pytest.mark.parametrize("knows", ["how far it was", "nothing"])
def test_a_folder_that_comes_back_from_an_older_copy(run, store, tmp_path, knows):
    """The server has steps that the copy lacks. They are computed again, twice, and are there once."""

    def write(num_lines):
        for _ in range(num_lines):
            run.step += 1
            speed = {"tokens_per_s": time.monotonic()} if run.step % 2 else {}
            run.folder.record({"loss": 1 / run.step, "norm": float("inf"), **speed}, run.step)
        run.folder.record({"eval_loss": float("nan")}, run.step)

    def resume_from(copy):
        run.join(is_orphan=True)
        run.folder._journal.finish()
        run.folder._release()
        shutil.rmtree(run.path)
        shutil.copytree(copy, run.path)
        run.step = 10
        run.resume(position)

    write(10)
    position = (run.path / "metrics.jsonl").stat().st_size
    wait_until(run.is_acked)
    write(4)
    wait_until(run.is_acked)
    shutil.copytree(run.path, tmp_path / "copy")
    if knows == "nothing":
        (tmp_path / "copy" / "tracking.json").unlink()
    write(10)
    wait_until(run.is_acked)
    resume_from(tmp_path / "copy")
    write(4)
    write(5)  # of 10 that the server has
    wait_until(run.is_acked)
    first = 1 if knows == "nothing" else 15
    assert run.writer.lines == [f"{run.uri} has the metrics of steps {first}-24 already: they are not sent again"]
    shutil.copytree(run.path, tmp_path / "later")
    resume_from(tmp_path / "later")
    write(4)
    write(10)
    write(5)
    run.end()
    assert (len(runs_on(store)), tracking_of(run.path)["servers"][0]["ahead_since_ms"]) == (1, None)
    stored = rows_on(store, run_id_of(run.path))
    there, here = ([ast.literal_eval(row)[:2] for row in rows] for rows in (stored, rows_in(run.path)))
    assert sorted(there) == sorted(set(there))
    assert sorted(there) == sorted(set(here))


def test_other_numbers_of_steps_that_are_repeated_are_sent():
    ahead = RowsAhead([Row("loss", 1.0, 10, 1), Row("lr", 0.1, 10, 1), Row("tokens_per_s", 7, 10, 1)])
    other = [Row("loss", 2.0, 20, 1), Row("lr", 0.2, 20, 1), Row("tokens_per_s", 9, 20, 1)]
    assert ahead.without(other) == other
    assert ahead.without([Row("loss", 1.0, 30, 1), Row("lr", 0.2, 30, 1), Row("tokens_per_s", 8, 30, 1)]) == [
        Row("lr", 0.2, 30, 1)
    ]
    assert ahead.without([Row("loss", 1.0, 40, 1)]) == [Row("loss", 1.0, 40, 1)], "it was there once"
    assert (ahead.steps, bool(ahead), bool(RowsAhead())) == ([1], True, False)


@pytest.mark.parametrize(
    ("metric", "about", "status", "expected"),
    [
        ("accuracy", {}, {}, True),
        ("mse", {}, {}, False),
        ("perplexity", {}, {}, False),
        ("joy", {}, {}, None),
        ("joy", {}, {"metric_name": "joy", "higher_is_better": False}, False),
        ("joy", {}, {"metric_name": "other", "higher_is_better": False}, None),
        ("joy", {"higher_is_better": True}, {"metric_name": "joy", "higher_is_better": False}, True),
    ],
)
def test_whether_higher_is_better(metric, about, status, expected):
    assert _is_higher_better(metric, RunDescription(**about), status) is expected


def test_rows_of_a_line():
    text = b'{"time": 1.5, "step": 3, "loss": "NaN", "a": 1, "note": "x", "ok": true, "none": null, "p": {"q": 2}}\n'
    rows = {row.key: row for row in rows_of(text)}
    assert set(rows) == {"loss", "a", "p/q"}
    assert (rows["a"].timestamp_ms, rows["a"].step, rows["a"].value) == (1_500, 3, 1.0)
    assert rows["loss"].value != rows["loss"].value
    for other in (b'{"time": 1, "config": {"lr": 1}}\n', b"{\n", b"[]\n", b'{"loss": 1}\n'):
        assert rows_of(other) == []


# ---------------------------------------------------------------------- outages are reported once


@pytest.fixture
def backoff(monkeypatch):
    """A backoff, its lines, and a clock that the test sets."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock, lines = Clock(), []
    monkeypatch.setattr(process, "time", clock)
    return Backoff(lines.append, "it waits", "it is back"), lines, clock


AWAY = UploadFailure("full", recovery="there is room")
OUTAGE = ["tracking: full; it waits", "tracking: there is room"]


def test_waits_grow(backoff):
    retry, lines, _ = backoff
    waits = []
    for _ in range(9):
        retry.record([AWAY])
        waits.append(retry.wait_s)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    retry.record([])
    retry.record([])
    assert lines == OUTAGE
    retry.record([UploadFailure("no", "do this")])
    assert retry.wait_s == 10


@pytest.mark.parametrize(("num_outages", "num_failures", "reported"), [(50, 1, 1), (2, 8, 2)])
def test_short_outages_are_reported_once_and_long_ones_each_time(backoff, num_outages, num_failures, reported):
    """A nearly full disk takes a small line now and then."""
    retry, lines, clock = backoff
    for _ in range(num_outages):
        for _ in range(num_failures):
            retry.record([AWAY])
            clock.now += 1 if num_failures == 1 else 60
        retry.record([])
        clock.now += 1
    assert lines == OUTAGE * reported


class FullAtTheEnd:
    """An upload whose metrics are all sent, and whose last step fails a few times."""

    is_attached = True
    num_failures = 20

    def __init__(self, *arguments, **options):
        pass

    def upload_metrics(self):
        return False

    def upload_files(self, *, is_over, with_model):
        return []

    def close(self):
        type(self).num_failures -= 1
        if self.num_failures >= 0:
            raise RuntimeError("(sqlite3.OperationalError) database or disk is full [SQL: INSERT INTO tags …]")

    def progress(self):
        return ()


def test_a_failure_after_the_metrics_is_not_over_with_them(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "RunUpload", FullAtTheEnd)
    monkeypatch.setattr(process, "open_tracking", lambda *arguments: None)
    monkeypatch.setattr(Parent, "wait", lambda self, seconds: None)
    (tmp_path / "run").mkdir()
    writer = Writer()
    upload_until_over(tmp_path / "run", "sqlite:///store.db", RunDescription(), Parent(is_over=True), writer)
    assert writer.lines == [
        "tracking: the disk of sqlite:///store.db is full; training continues, metrics are kept in the run folder",
        "tracking: sqlite:///store.db is back",
    ]
    assert writer.messages[-1] == {"done": True}


def test_a_full_run_folder_is_named_and_not_the_server(tmp_path):
    with mounted(tmp_path / "disk", "64k") as disk:
        tracking = Tracking(disk, RunDescription())
        tracking.write()
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
        tracking.about.name = "x" * 10_000
        with pytest.raises(OSError, match="No space left") as raised:
            tracking.write()
    failure = describe_failure(raised.value, "http://server")
    assert str(failure) == f"No space left on device: {disk}/tracking.json"
    assert failure.recovery == f"{disk}/tracking.json can be written again"


def test_a_full_target_of_a_copy_is_named_and_not_its_source(tmp_path):
    source = tmp_path / "source"
    source.write_bytes(bytes(200_000))
    with mounted(tmp_path / "disk", "64k") as disk:
        with pytest.raises(OSError, match="No space left") as raised:
            shutil.copyfile(source, disk / "copy")
        assert failed_path(raised.value) == str(disk / "copy")
    assert failed_path(OSError(errno.EACCES, "Permission denied", "one", None, "two")) == "one"
    assert failed_path(OSError(errno.ENOSPC, "No space left on device")) is None
