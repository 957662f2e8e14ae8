"""Upload a run folder to an MLflow server: metrics in the order of metrics.jsonl, recipe, files, best model.

Everything is read from the folder. So a run can be uploaded while it trains, afterwards, or again to another server.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.errors import CheckpointError, RecipeError
from trimtab.runs.journal import JOURNAL, complete_lines
from trimtab.runs.run_folder import actual_state, read_status
from trimtab.runs.tracking_file import TRACKING, RunDescription, Tracking, upload_lock
from trimtab.tracking.mlflow.origin_tags import commit_tags
from trimtab.tracking.mlflow.server import MAX_METRICS, MlflowServer, Row, UploadFailure, describe_failure, long_timeout
from trimtab.tracking.upload.metric_rows import rows_of
from trimtab.tracking.upload.server_history import RowsAhead, find_rows_ahead

ERROR_TAG = "trimtab.error"
_STATUSES = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "FAILED"}
_FIRST_FILES = ("recipe.yaml", "plan.json")
_LAST_FILES = (JOURNAL, "report.html", "out-of-memory*.html", "*.png", "bad-rows-*.jsonl")
_MODEL = "best"
_CARD = "trimtab.json"  # in the folder of the best model
_MAX_READ_BYTES = 1 << 20
_STATUS_TAGS = (  # keys of run.json that become tags
    "step",
    "stop_reason",
    "metric_name",
    "best_metric",
    "best_step",
    "train_seconds",
    "num_tokens",
    "num_skipped",
    "peak_memory_bytes",
)


class RunUpload:
    """Upload one run to one server in small steps. A step that fails is repeated as a whole.

    Args:
        tracking: The run, and the state of its uploads.
        uri: The server.
        tell: Called with a line for the user.
        on_upload: Called before each file, whose upload may take long.

    Attributes:
        is_attached: Whether the server has responded and has the run.
    """

    def __init__(
        self, tracking: Tracking, uri: str, tell: Callable[[str], None], on_upload: Callable[[], None] = lambda: None
    ) -> None:
        self._tracking, self._uri, self._tell, self._on_upload = tracking, uri, tell, on_upload
        self._folder = tracking.folder
        self._state = tracking.at(uri)
        self._server: MlflowServer | None = None
        self.is_attached = False
        self._renamed: dict[str, str] = {}
        self._ahead = RowsAhead()

    def upload_metrics(self) -> bool:
        """Upload the next lines of the journal.

        Returns:
            Whether more lines may already be waiting.
        """
        server, run_id = self._attach()
        state = self._state
        end, rows, is_full = state.acked, list[Row](), False
        ahead = self._ahead.copy()  # the original is replaced only once the server has confirmed the batch
        for text, line_end in complete_lines(self._folder / JOURNAL, state.acked, _MAX_READ_BYTES):
            found = self._rows(text)
            is_full = bool(rows) and len(rows) + len(found) > MAX_METRICS
            if is_full:
                break
            rows, end = rows + ahead.without(found), line_end
        if end == state.acked:
            return False
        is_full = is_full or end - state.acked >= _MAX_READ_BYTES // 2
        state.sent = max(end, state.sent)  # before sending: a process that resumes after a kill must see this bound
        self._tracking.write()
        refused = server.log_rows(run_id, rows) if rows else []
        if refused:
            names = ", ".join(sorted({row.key for row in refused}))
            self._tell(f"the tracking server does not accept {len(refused)} values of {names}")
        state.acked, self._ahead = end, ahead
        if not ahead:
            state.ahead_since_ms = None
        self._tracking.write()
        return is_full

    def upload_files(self, *, is_over: bool, with_model: bool) -> list[UploadFailure]:
        """Upload new and changed files.

        Args:
            is_over: Whether the run has ended; then files that are written at its end are included.
            with_model: Whether to include the best model of a run that has ended.

        Returns:
            The files that failed although the server responds, and why.
        """
        server, run_id = self._attach()
        failures = []
        for path in _files(self._folder, is_over=is_over, with_model=with_model and self._tracking.about.log_model):
            checksum = _checksum(path)
            if self._state.artifacts.get(path.name) == checksum:
                continue
            self._on_upload()
            try:
                if path.is_dir():
                    self._log_model(server, run_id, path)
                else:
                    server.log_file(run_id, path)
            except Exception as error:
                server.client.get_run(run_id)  # raises if the server itself, and not its file store, has failed
                failure = describe_failure(error, self._uri)
                failures.append(UploadFailure(f"{path.name}: {failure.words}", failure.cure))
                continue
            self._state.artifacts[path.name] = checksum
            self._tracking.write()
        return failures

    def close(self) -> None:
        """Set the status of the run, and its summary as tags."""
        server, run_id = self._attach()
        state, reason = actual_state(self._folder)
        status = _STATUSES[state]
        run = read_status(self._folder) or {}
        tags = {f"trimtab.{key}": str(run[key]) for key in _STATUS_TAGS if run.get(key) is not None}
        if status == "FAILED":
            tags[ERROR_TAG] = reason or "unknown"
        else:
            server.drop_tag(run_id, ERROR_TAG)
        server.set_tags(run_id, tags | {"trimtab.state": state})
        server.set_status(run_id, status, int(run.get("updated", time.time()) * 1000))
        self._state.status = status
        self._tracking.write()

    def progress(self) -> tuple[Any, ...]:
        """Return a value that changes whenever something was uploaded."""
        state = self._state
        return state.run_id, state.params, state.acked, len(state.artifacts), state.status

    def _attach(self) -> tuple[MlflowServer, str]:
        """Return the server and the id of the run; the first time, create or find it and write params and tags."""
        if self._server is None:
            self._server = MlflowServer(self._uri)
        server, about, state = self._server, self._tracking.about, self._state
        if self.is_attached and state.run_id is not None:
            return server, state.run_id
        if state.run_id is not None and not self._exists(server, state.run_id):
            state.reset()
        if state.run_id is None:
            state.experiment, state.experiment_id = about.experiment, server.experiment_id(about.experiment)
            state.run_id = server.open_run(state.experiment_id, about.name, about.run, about.started_ms, about.parent)
        if actual_state(self._folder)[0] == "running":
            server.drop_tag(state.run_id, ERROR_TAG)  # left by an attempt that was resumed
            server.set_status(state.run_id, "RUNNING")
            state.status = "RUNNING"
        size = (self._folder / JOURNAL).stat().st_size
        state.acked, state.sent = min(state.acked, size), min(state.sent, size)  # the journal may have lost lines
        was_ahead = state.ahead_since_ms is not None
        self._ahead = find_rows_ahead(server, state.run_id, self._folder, state)
        if self._ahead and not was_ahead:
            first, last = self._ahead.steps[0], self._ahead.steps[-1]
            self._tell(f"{state.uri} has the metrics of steps {first:,}-{last:,} already: they are not sent again")
        self._tracking.write()
        self._describe(server, state.run_id)
        self.is_attached = True
        return server, state.run_id

    def _exists(self, server: MlflowServer, run_id: str) -> bool:
        try:
            if server.client.get_run(run_id).info.lifecycle_stage != "deleted":
                return True
        except Exception as error:
            if not describe_failure(error, self._uri).is_gone:
                raise
        self._tell(f"{self._state.uri} no longer has the run: everything is uploaded again")
        return False

    def detach(self) -> None:
        """Look the run up again, after the server has reported that it does not exist."""
        self.is_attached = False

    def _describe(self, server: MlflowServer, run_id: str) -> None:
        about = self._tracking.about
        params = about.params or _params_of_journal(self._folder / JOURNAL)
        changed = server.log_params(run_id, params)
        tags = dict(about.tags)
        if changed:
            tags["trimtab.changed"] = "; ".join(f"{key}: {was} → {now}" for key, (was, now) in changed.items())
        server.set_tags(run_id, tags)
        self._state.params = True
        self._tracking.write()

    def _rows(self, text: bytes) -> list[Row]:
        renamed: dict[str, str] = {}
        rows = rows_of(text, renamed)
        for name in renamed.keys() - self._renamed.keys():
            self._tell(f"the metric {name!r} is named {renamed[name]!r} on the tracking server")
        self._renamed |= renamed
        return rows

    def _log_model(self, server: MlflowServer, run_id: str, folder: Path) -> None:
        from trimtab.model.hub import resolve_source
        from trimtab.tracking.mlflow.best_model import log_best_model  # imports torch

        resolve_source(str(folder), adapters=True)  # damaged weights must not reach the server

        about = self._tracking.about
        card = json.loads((folder / _CARD).read_text())
        metric = about.metric or card.get("metric") or "loss"
        value = card.get("metrics", {}).get(metric)
        with long_timeout():
            log_best_model(
                server.client,
                run_id,
                folder,
                register=about.register,
                metric=metric,
                value=value if isinstance(value, int | float) else None,
                higher_is_better=_is_higher_better(metric, about, read_status(self._folder) or {}),
                tell=self._tell,
            )


def _is_higher_better(metric: str, about: RunDescription, status: Mapping[str, Any]) -> bool | None:
    """Return the direction of a metric; None for a user's metric whose direction was not recorded."""
    from trimtab.data.metrics import higher_is_better  # imports torch

    if about.higher_is_better is not None:
        return about.higher_is_better
    if status.get("metric_name") == metric and status.get("higher_is_better") is not None:
        return bool(status["higher_is_better"])
    try:
        return higher_is_better(metric)
    except RecipeError:
        return None


def describe_missing(tracking: Tracking, uri: str, *, with_model: bool) -> str:
    """Describe what a server lacks of a finished run; empty if it has everything."""
    state = tracking.at(uri)
    num_lines = sum(1 for text, _ in complete_lines(tracking.folder / JOURNAL, state.acked) if rows_of(text))
    files = _files(tracking.folder, is_over=True, with_model=with_model and tracking.about.log_model)
    names = [path.name for path in files if state.artifacts.get(path.name) != _checksum(path)]
    lines = [f"{num_lines:,} line{'s' if num_lines > 1 else ''} of metrics"] if num_lines else []
    listed = ", ".join("the best model" if name == _MODEL else name for name in names)
    return " and ".join([*lines, *([listed] if listed else [])])


def _params_of_journal(path: Path) -> dict[str, str]:
    """Read the recipe from the first line of a journal, for a run that was not tracked while it trained."""
    first = next((text for text, _ in complete_lines(path, max_bytes=1)), b"{}")
    try:
        return flatten_params(json.loads(first).get("config") or {})
    except (ValueError, AttributeError):
        return {}


def flatten_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested settings to text values by dotted key."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flatten_params(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def _files(folder: Path, *, is_over: bool, with_model: bool) -> list[Path]:
    names = [*_FIRST_FILES, *(_LAST_FILES if is_over else ())]
    files = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    model = folder / _MODEL
    return [*files, model] if is_over and with_model and (model / _CARD).is_file() else files


def _checksum(path: Path) -> str:
    """Hash a file; of a model, which is large, its card and the sizes of its files."""
    if path.is_dir():
        sizes = sorted((inner.name, inner.stat().st_size) for inner in path.iterdir() if inner.is_file())
        return hashlib.sha256((path / _CARD).read_bytes() + repr(sizes).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_tracking(folder: Path, about: RunDescription, uri: str) -> Tracking:
    """Update `tracking.json` with the current facts of a run; its id and start time stay.

    The server is recorded before it is contacted, so that `track sync` knows the target of an upload that failed.
    """
    found = Tracking.read(folder)
    tags = {**about.tags, **commit_tags(Path.cwd())}
    if found is None:
        found = Tracking(folder, replace(about, tags=tags))
    else:
        before = found.about
        found.about = replace(
            about,
            run=before.run,
            started_ms=before.started_ms,
            parent=about.parent or before.parent,
            tags=before.tags | tags,
        )
    found.at(uri)
    found.write()
    return found


def upload_run(tracking: Tracking, uri: str, tell: Callable[[str], None]) -> list[UploadFailure]:
    """Upload a whole run from this process.

    Returns:
        The files that failed, and why.
    """
    upload = RunUpload(tracking, uri, tell)
    while upload.upload_metrics():
        pass
    is_over = actual_state(tracking.folder)[0] != "running"
    failures = upload.upload_files(is_over=is_over, with_model=True)
    upload.close()
    return failures


def close_killed(folders: Iterable[Path], uri: str) -> None:
    """Close killed runs of other folders whose status on the server is still RUNNING."""
    address = redact(uri)
    for folder in folders:
        tracking = Tracking.read(folder) if (folder / TRACKING).is_file() else None
        if tracking is None or actual_state(folder)[0] != "killed":
            continue
        if any(state.uri == address and state.run_id and state.status == "RUNNING" for state in tracking.servers):
            with contextlib.suppress(CheckpointError), upload_lock(folder, patience_s=0.0):
                RunUpload(tracking, uri, lambda text: None).close()
