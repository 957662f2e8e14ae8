"""MLflow as this project needs it: a run that is made once and found again, batches within its limits, plain troubles.

mlflow is imported when a server is opened, which takes seconds: in the process beside the training, or in a command.
"""

import contextlib
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trimtab.addresses import redact
from trimtab.checkpoint.disk_errors import refused_path
from trimtab.errors import UserError
from trimtab.tracking.mlflow.uri import artifact_location, sqlite_file

T = TypeVar("T")

RUN_TAG = "trimtab.run"  # tells a run from all others, on every server
CUT_TAG = "trimtab.cut"  # parameters and tags that were too long
_PARENT_TAG = "mlflow.parentRunId"
MAX_METRICS = 1000  # these are mlflow.utils.validation's; a server of another version is not laxer
_MAX_PARAMS_OR_TAGS = 100
_MAX_KEY = 250
_MAX_PARAM = 6000
_MAX_TAG = 8000
_MAX_BATCH_BYTES = 500_000  # half of what a request may have
_REQUEST_S = 10
_LARGE_BYTES = 1 << 20
_UPLOAD_S = 120  # a server may write a large file elsewhere before it answers
_FORCED = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # an answer must mean that it is there
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(_REQUEST_S),
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # it writes a traceback for every moment that a database is locked
}
_DENIED = {"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"}
_INVALID = {"INVALID_PARAMETER_VALUE", "MALFORMED_REQUEST"}


@dataclass(frozen=True)
class Row:
    """One number: a row of MLflow's table of metrics."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(frozen=True)
class Trouble:
    """Why something could not be done on a server.

    Attributes:
        kind: `away` (may be better soon), `denied`, `gone` (the run is not there), `invalid` (never better), or `wrong`
            (an address at which there is no MLflow).
        words: For the user, in one line.
        cure: What mends it, where waiting does not.
        over: What to say when it is over, where it was not the server that failed.
    """

    kind: str
    words: str
    cure: str = ""
    over: str = ""

    def __str__(self) -> str:
        return f"{self.words}; {self.cure}" if self.cure else self.words


class ExperimentDeleted(UserError):
    """An experiment whose name is taken by one that was deleted."""


@contextlib.contextmanager
def mlflow_settings() -> Iterator[None]:
    """Inside, mlflow does not retry for minutes by itself, prints nothing, and does not call home."""
    given = {name: os.environ.get(name) for name in (*_FORCED, *_DEFAULTS)}
    os.environ.update(_FORCED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        yield
    finally:
        for name, before in given.items():
            os.environ.pop(name, None)
            if before is not None:
                os.environ[name] = before


class MlflowServer:
    """A tracking server, or a store that is used without one.

    Args:
        uri: Its address.
    """

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        path = sqlite_file(uri)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.uri = uri
        self.client = MlflowClient(tracking_uri=uri)

    def experiment_id(self, name: str) -> str:
        """The id of an experiment, which is made if there is none.

        Raises:
            ExperimentDeleted: There is one that somebody has deleted.
        """
        if self.uri.startswith("databricks") and not name.startswith("/"):
            name = f"/Shared/{name}"  # names there are places of the workspace
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name, artifact_location=artifact_location(self.uri)))
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)  # another run was faster
        if found is None or found.lifecycle_stage == "deleted":
            raise ExperimentDeleted(
                f"the experiment {name} was deleted on {redact(self.uri)}",
                "restore it there, or choose another with track.experiment",
            )
        return str(found.experiment_id)

    def open_run(self, experiment_id: str, name: str, token: str, started_ms: int, parent: str | None) -> str:
        """Make a run, or find the one that was made before: the answer to its making may have been lost.

        Args:
            experiment_id: Where.
            name: Of the run.
            token: What tells it from all others.
            started_ms: When it began.
            parent: The id of the run that it is a part of.

        Returns:
            Its id.
        """
        found = self.client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{token}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {RUN_TAG: token} | ({} if parent is None else {_PARENT_TAG: parent})
        run = self.client.create_run(experiment_id, start_time=started_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def log_rows(self, run_id: str, rows: Sequence[Row]) -> list[Row]:
        """Write numbers. Rows that are there already stay as they are: MLflow knows a row by all of its values.

        Returns:
            Rows that the server does not take, whatever one does.
        """
        from mlflow.entities import Metric

        def send(part: Sequence[Row]) -> None:
            self.client.log_batch(run_id, metrics=[Metric(r.key, r.value, r.timestamp_ms, r.step) for r in part])

        refused: list[Row] = []
        for part in _parts(rows, MAX_METRICS, lambda row: len(row.key.encode()) + 100):
            refused += _each_that_is_taken(send, part)
        return refused

    def newest_rows(self, run_id: str) -> list[Row]:
        """The newest number of each metric."""
        found = self.client.get_run(run_id).data.to_proto().metrics
        return [Row(one.key, one.value, one.timestamp, one.step) for one in found]

    def history(self, run_id: str, key: str) -> list[Row]:
        """Every number of a metric."""
        found = self.client.get_metric_history(run_id, key)
        return [Row(one.key, one.value, one.timestamp, one.step) for one in found]

    def log_params(self, run_id: str, params: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Write parameters that are not there yet; MLflow never changes one.

        Returns:
            Those that are there with another value: before and now.
        """
        from mlflow.entities import Param

        there = self.client.get_run(run_id).data.params
        tidy = {valid_key(key): cut(value, _MAX_PARAM) for key, value in params.items()}
        new = [Param(key, value) for key, value in tidy.items() if key not in there]
        for part in _parts(new, _MAX_PARAMS_OR_TAGS, lambda one: len(one.key.encode()) + len(one.value.encode())):
            _each_that_is_taken(lambda batch: self.client.log_batch(run_id, params=list(batch)), part)
        too_long = [key for key, value in params.items() if len(value) > _MAX_PARAM]
        if too_long:
            self.set_tags(run_id, {CUT_TAG: f"cut to {_MAX_PARAM} characters: {', '.join(too_long)}"})
        return {key: (there[key], value) for key, value in tidy.items() if key in there and there[key] != value}

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Write tags, in the place of those that are there."""
        from mlflow.entities import RunTag

        tidy = [RunTag(valid_key(key), cut(value, _MAX_TAG)) for key, value in tags.items()]
        for part in _parts(tidy, _MAX_PARAMS_OR_TAGS, lambda one: len(one.key.encode()) + len(one.value.encode())):
            _each_that_is_taken(lambda batch: self.client.log_batch(run_id, tags=list(batch)), part)

    def drop_tag(self, run_id: str, name: str) -> None:
        """Take a tag away, if it is there."""
        if name in self.client.get_run(run_id).data.tags:
            self.client.delete_tag(run_id, name)

    def log_file(self, run_id: str, path: Path) -> None:
        """Store a file with a run."""
        if path.stat().st_size > _LARGE_BYTES:
            self.patiently(lambda: self.client.log_artifact(run_id, str(path)))
        else:
            self.client.log_artifact(run_id, str(path))

    def set_status(self, run_id: str, status: str, ended_ms: int | None = None) -> None:
        """RUNNING, FINISHED, KILLED or FAILED."""
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, end_time=ended_ms)

    def patiently(self, work: Callable[[], T]) -> T:
        """Do something that may take a server long."""
        before = os.environ.get("MLFLOW_HTTP_REQUEST_TIMEOUT")
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(max(_UPLOAD_S, int(before or 0)))
        try:
            return work()
        finally:
            if before is None:
                del os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"]
            else:
                os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = before


def trouble_of(error: Exception, uri: str) -> Trouble:
    """What a failure means, in words."""
    server = redact(uri)
    code = str(getattr(error, "error_code", ""))
    text = redact(" ".join(str(error).split()))
    if isinstance(error, ExperimentDeleted):
        return Trouble("wrong", error.problem, error.cure)
    if code in _DENIED:
        if "PERMISSION" in code:
            return Trouble("denied", f"{server} does not let this user write there", "ask for the right to")
        cure = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        return Trouble("denied", f"{server} does not know us (wrong token or password)", cure)
    if code == "RESOURCE_DOES_NOT_EXIST":
        return Trouble("gone", f"{server} does not know the run: {text[:200]}")
    if code == "ENDPOINT_NOT_FOUND":
        return Trouble("wrong", f"{server} answers, but is no MLflow server", "see track.uri")
    if code in _INVALID:
        return Trouble("invalid", text[:300])
    if "database is locked" in text:
        return Trouble("away", f"{server} is locked by another program")
    if "database or disk is full" in text:
        return Trouble("away", f"the disk of {server} is full")
    if isinstance(error, OSError) and error.strerror:
        place = refused_path(error)
        over = "" if place is None else f"{place} can be written again"
        return Trouble("away", error.strerror if place is None else f"{error.strerror}: {place}", over=over)
    return Trouble("away", f"{server}: {_cause(text)}")


def _cause(text: str) -> str:
    """The gist of a failed request, whose text repeats the address and the names of classes."""
    for pattern in (r"\[Errno -?\d+\] ([\w ]+)", r"(Read timed out|timed out)", r"(too many \d+ error responses)"):
        found = re.search(pattern, text)
        if found:
            return found[1]
    return text[:200]


def valid_key(name: str) -> str:
    """A name as MLflow takes it: other characters become `_`."""
    tidy = re.sub(r"[^/\w.\- :]", "_", name)
    normal = posixpath.normpath(tidy).lstrip("/")
    if normal == "." or normal.startswith(".."):
        normal = "_" + normal.lstrip("./")
    return normal[:_MAX_KEY]


def cut(text: str, limit: int) -> str:
    """A text of at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _parts(items: Iterable[T], most: int, size: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut into batches that a request may have."""
    part: list[T] = []
    room = _MAX_BATCH_BYTES
    for item in items:
        if part and (len(part) == most or room < size(item)):
            yield part
            part, room = [], _MAX_BATCH_BYTES
        part.append(item)
        room -= size(item)
    if part:
        yield part


def _each_that_is_taken(send: Callable[[Sequence[T]], Any], part: Sequence[T]) -> list[T]:
    """Send a batch; if the server finds fault with it, its halves, down to the one that is at fault.

    Returns:
        What was not taken.
    """
    try:
        send(part)
    except Exception as error:
        if getattr(error, "error_code", "") not in _INVALID:
            raise
        if len(part) == 1:
            return [part[0]]
        half = len(part) // 2
        return _each_that_is_taken(send, part[:half]) + _each_that_is_taken(send, part[half:])
    return []
