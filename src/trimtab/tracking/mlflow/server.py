"""An MLflow server as the uploader uses it: runs that are created once, batches within limits, classified errors.

mlflow takes seconds to import, so it is imported when a server is opened: in the uploader process, or in a command.
"""

import contextlib
import os
import posixpath
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlparse
from urllib.request import getproxies

from trimtab.addresses import redact
from trimtab.checkpoint.disk_errors import failed_path
from trimtab.errors import UserError
from trimtab.tracking.mlflow.uri import artifact_location, gets_credentials, sqlite_file

T = TypeVar("T")

RUN_TAG = "trimtab.run"  # unique id of the run, the same on every server
CUT_TAG = "trimtab.cut"  # names the parameters that were too long
_PARENT_TAG = "mlflow.parentRunId"
MAX_METRICS = 1000  # per request, as the other limits from mlflow.utils.validation
_MAX_PARAMS_OR_TAGS = 100
# Bytes in UTF-8 that every server accepts, Databricks included.
_MAX_KEY = 250
_MAX_PARAM = 6000
_MAX_TAG = 5000
_MAX_BATCH_BYTES = 500_000  # half of MLflow's limit for a request
_LARGE_BYTES = 1 << 20
_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
_REQUEST_S = 10
_UPLOAD_S = 120  # a server may copy a large file to its object store before it responds
_FORCED = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # by default mlflow retries for minutes
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": str(_REQUEST_S),  # it waits as a busy workspace asks, so long
    "MLFLOW_ENABLE_ASYNC_LOGGING": "false",  # otherwise a response would not mean that the data is stored
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
_DEFAULTS = {
    _TIMEOUT: str(_REQUEST_S),
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # it logs a traceback each time a database is locked
}
_CREDENTIALS = ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD")
_DENIED = {"UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED", "PERMISSION_DENIED"}
_INVALID = {"INVALID_PARAMETER_VALUE", "MALFORMED_REQUEST"}


@dataclass(frozen=True)
class Row:
    """A row of MLflow's metrics table."""

    key: str
    value: float
    timestamp_ms: int
    step: int


@dataclass(frozen=True)
class UploadFailure:
    """Why a server or the disk refused something.

    Attributes:
        words: One line for the user.
        cure: What the user has to do, if waiting does not help.
        recovery: Message for the recovery, if it was not the server that failed.
        is_gone: Whether the server responds, but does not have the run or model.
    """

    words: str
    cure: str = ""
    recovery: str = ""
    is_gone: bool = False

    def __str__(self) -> str:
        return f"{self.words}; {self.cure}" if self.cure else self.words


class ExperimentDeleted(UserError):
    """The experiment was deleted on the server, and its name is still taken."""


@contextlib.contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    try:
        _set_variables(values)
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def mlflow_environment(uri: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which mlflow neither retries for minutes, nor prints, nor sends telemetry.

    Args:
        uri: The server that is used in it; credentials of another one are hidden.
    """
    hidden = {} if gets_credentials(uri) else dict.fromkeys(_CREDENTIALS)
    return _environment(_FORCED | {name: os.environ.get(name, value) for name, value in _DEFAULTS.items()} | hidden)


def check_reachable(uri: str) -> None:
    """Report at once that a Databricks workspace does not answer; its client would try for five minutes.

    Raises:
        UserError: No connection to DATABRICKS_HOST.
    """
    host = os.environ.get("DATABRICKS_HOST", "")
    if not is_databricks(uri) or not host or getproxies():
        return
    address = urlparse(host if "://" in host else f"https://{host}")
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_REQUEST_S).close()
    except OSError as error:
        problem = f"the Databricks workspace {redact(host)} cannot be reached: {error.strerror or error}"
        raise UserError(problem) from error


def is_databricks(uri: str) -> bool:
    """Whether an address is a Databricks workspace: `databricks`, or `databricks://PROFILE`."""
    return uri.partition("://")[0] == "databricks"


class MlflowServer:
    """A tracking server, or a sqlite store that is used directly.

    Args:
        uri: Its address.
    """

    def __init__(self, uri: str) -> None:
        from mlflow import MlflowClient

        check_reachable(uri)
        path = sqlite_file(uri)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self.uri = uri
        self.client = MlflowClient(tracking_uri=uri)

    def experiment_id(self, name: str) -> str:
        """Return the id of an experiment, created if needed.

        Raises:
            ExperimentDeleted: It was deleted on the server.
        """
        if is_databricks(self.uri) and not name.startswith("/"):
            name = f"/Shared/{name}"  # names are paths of the workspace there
        found = self.client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self.client.create_experiment(name, artifact_location=artifact_location(self.uri)))
            except Exception as error:
                if getattr(error, "error_code", "") != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self.client.get_experiment_by_name(name)  # another run has just created it
        if found is None or found.lifecycle_stage == "deleted":
            raise ExperimentDeleted(
                f"the experiment {name} was deleted on {redact(self.uri)}",
                "restore it, or set another track.experiment",
            )
        return str(found.experiment_id)

    def open_run(self, experiment_id: str, name: str, token: str, started_ms: int, parent: str | None) -> str:
        """Return the id of the run that is tagged with `token`, created if needed.

        It is searched first, because the response to an earlier `create_run` may have been lost.
        """
        found = self.client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{token}'", max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {RUN_TAG: token} | ({} if parent is None else {_PARENT_TAG: parent})
        run = self.client.create_run(experiment_id, start_time=started_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def log_rows(self, run_id: str, rows: Sequence[Row]) -> list[Row]:
        """Write metrics; rows that the server already has are not duplicated: MLflow's primary key is the whole row.

        Returns:
            Rows that the server does not accept.
        """
        from mlflow.entities import Metric

        metrics = [Metric(row.key, row.value, row.timestamp_ms, row.step) for row in rows]
        return [_row(metric) for metric in self._log(run_id, "metrics", metrics, MAX_METRICS)]

    def newest_rows(self, run_id: str) -> list[Row]:
        """Return the newest row of each metric."""
        return [_row(metric) for metric in self.client.get_run(run_id).data.to_proto().metrics]

    def history(self, run_id: str, key: str) -> list[Row]:
        """Return every row of a metric."""
        return [_row(metric) for metric in self.client.get_metric_history(run_id, key)]

    def log_params(self, run_id: str, params: Mapping[str, str]) -> dict[str, tuple[str, str]]:
        """Write new parameters; MLflow never changes an existing one.

        Returns:
            Parameters that the server has with another value: that value and the new one.
        """
        from mlflow.entities import Param

        there = self.client.get_run(run_id).data.params
        valid = {valid_key(key): cut(value, _MAX_PARAM) for key, value in params.items()}
        new = [Param(key, value) for key, value in valid.items() if key not in there]
        self._log(run_id, "params", new, _MAX_PARAMS_OR_TAGS)
        too_long = [key for key, value in params.items() if len(value.encode()) > _MAX_PARAM]
        if too_long:
            self.set_tags(run_id, {CUT_TAG: f"cut to {_MAX_PARAM} bytes: {', '.join(too_long)}"})
        return {key: (there[key], value) for key, value in valid.items() if key in there and there[key] != value}

    def set_tags(self, run_id: str, tags: Mapping[str, str]) -> None:
        """Write tags; existing ones are replaced."""
        from mlflow.entities import RunTag

        valid = [RunTag(valid_key(key), cut(value, _MAX_TAG)) for key, value in tags.items()]
        self._log(run_id, "tags", valid, _MAX_PARAMS_OR_TAGS)

    def _log(self, run_id: str, kind: str, entities: Iterable[T], max_entities: int) -> list[T]:
        """Send metrics, params or tags in batches; return those that the server does not accept."""

        def send(batch: Any) -> None:
            self.client.log_batch(run_id, **{kind: batch})

        refused: list[T] = []
        for batch in _batches(entities, max_entities):
            refused += _send_valid(send, batch)
        return refused

    def drop_tag(self, run_id: str, name: str) -> None:
        """Remove a tag, if it exists."""
        if name in self.client.get_run(run_id).data.tags:
            self.client.delete_tag(run_id, name)

    def log_file(self, run_id: str, path: Path) -> None:
        """Upload a file as an artifact."""
        with long_timeout() if path.stat().st_size > _LARGE_BYTES else contextlib.nullcontext():
            self.client.log_artifact(run_id, str(path))

    def set_status(self, run_id: str, status: str, ended_ms: int | None = None) -> None:
        """Set the status: RUNNING, FINISHED, KILLED or FAILED."""
        if status == "RUNNING":
            self.client.update_run(run_id, status=status)
        else:
            self.client.set_terminated(run_id, status, end_time=ended_ms)


def _row(metric: Any) -> Row:
    return Row(metric.key, metric.value, metric.timestamp, metric.step)


def long_timeout() -> contextlib.AbstractContextManager[None]:
    """Return a context in which mlflow waits longer for each response, for large uploads."""
    return _environment({_TIMEOUT: str(max(_UPLOAD_S, int(os.environ.get(_TIMEOUT) or 0)))})


def describe_failure(error: Exception, uri: str) -> UploadFailure:
    """Classify an exception from mlflow or the operating system, and describe it to the user."""
    server = redact(uri)
    code = str(getattr(error, "error_code", ""))
    text = redact(" ".join(str(error).split()))
    if isinstance(error, UserError):
        return UploadFailure(error.problem, error.cure)
    if code in _DENIED and is_databricks(uri):
        cure = "check DATABRICKS_HOST and DATABRICKS_TOKEN; or ask its owner for permission"
        return UploadFailure(f"{server} does not allow this user to read or write", cure)
    if "credential configuration failed" in text:
        return UploadFailure(f"{server}: no credentials were found", "set DATABRICKS_HOST and DATABRICKS_TOKEN")
    if code in _DENIED:
        if "PERMISSION" in code:
            return UploadFailure(f"{server} does not allow this user to write", "ask its owner for permission")
        cure = "set MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        if not gets_credentials(uri):
            cure = f"those of the environment are for MLFLOW_TRACKING_URI: set that to {server}, and track.uri: local"
        return UploadFailure(f"{server} rejects the credentials", cure)
    if code == "RESOURCE_DOES_NOT_EXIST":
        return UploadFailure(f"{server} does not have this object: {text[:200]}", is_gone=True)
    if code == "ENDPOINT_NOT_FOUND":
        return UploadFailure(f"{server} responds, but is not an MLflow server", "correct track.uri")
    if code in _INVALID:
        return UploadFailure(text[:300])
    if "database is locked" in text:
        return UploadFailure(f"{server} is locked by another program")
    if "database or disk is full" in text:
        return UploadFailure(f"the disk of {server} is full")
    if isinstance(error, OSError) and error.strerror:
        path = failed_path(error)
        recovery = "" if path is None else f"{path} can be written again"
        return UploadFailure(error.strerror if path is None else f"{error.strerror}: {path}", recovery=recovery)
    return UploadFailure(f"{server}: {_cause(text)}")


def _cause(text: str) -> str:
    """Extract the cause from the message of a failed request, which repeats the address and names of classes."""
    for pattern in (r"\[Errno -?\d+\] ([\w ]+)", r"(Read timed out|timed out)", r"(too many \d+ error responses)"):
        found = re.search(pattern, text)
        if found:
            return found[1]
    return text[:200]


def valid_key(name: str) -> str:
    """Convert a name to one that MLflow accepts: other characters become `_`."""
    normal = posixpath.normpath(re.sub(r"[^/\w.\- :]", "_", name)).lstrip("/")
    if normal == "." or normal.startswith(".."):
        normal = "_" + normal.lstrip("./")
    return normal.encode()[:_MAX_KEY].decode(errors="ignore")


def cut(text: str, limit: int) -> str:
    """Shorten a text to at most `limit` bytes in UTF-8."""
    encoded = text.encode()
    return text if len(encoded) <= limit else encoded[: limit - len("…".encode())].decode(errors="ignore") + "…"


def _batches(entities: Iterable[Any], max_entities: int) -> Iterator[list[Any]]:
    """Split metrics, params or tags into batches that fit into a request."""
    batch: list[Any] = []
    num_bytes = 0
    for entity in entities:
        size = len(entity.key.encode()) + len(str(entity.value).encode()) + 80
        if batch and (len(batch) == max_entities or num_bytes + size > _MAX_BATCH_BYTES):
            yield batch
            batch, num_bytes = [], 0
        batch.append(entity)
        num_bytes += size
    if batch:
        yield batch


def _send_valid(send: Callable[[list[T]], Any], batch: list[T]) -> list[T]:
    """Send a batch; if the server finds a value invalid, bisect the batch and send the rest.

    Returns:
        The values that the server does not accept.
    """
    try:
        send(batch)
    except Exception as error:
        if getattr(error, "error_code", "") not in _INVALID:
            raise
        if len(batch) == 1:
            return batch
        half = len(batch) // 2
        return _send_valid(send, batch[:half]) + _send_valid(send, batch[half:])
    return []
