"""Brings a run's folder to an MLflow server: numbers in the order of metrics.jsonl, the recipe, files, the best model.

Everything is read from the folder, so that it can be done beside the training, after it, or again to another server.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.errors import CheckpointError, RecipeError
from trimtab.runs.journal import JOURNAL
from trimtab.runs.run_folder import how_it_stands, read_status
from trimtab.tracking.mlflow.origin_tags import commit_tags
from trimtab.tracking.mlflow.server import MAX_METRICS, MlflowServer, Row, Trouble, trouble_of, valid_key
from trimtab.tracking.upload.attachment import TRACKING, About, Tracking, shipping
from trimtab.tracking.upload.journal_rows import MAX_READ_BYTES, rows_of, whole_lines
from trimtab.tracking.upload.server_history import RowsAhead, look_ahead

ERROR_TAG = "trimtab.error"
_STATUSES = {"running": "RUNNING", "finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED", "killed": "FAILED"}
_FIRST_FILES = ("recipe.yaml", "plan.json")
_LAST_FILES = (JOURNAL, "report.html", "*.png", "bad-rows-*.jsonl")
_MODEL = "best"
_SUMMARY = (  # of run.json, which become tags
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


@dataclass(frozen=True)
class Waiting:
    """What a server does not have yet."""

    num_lines: int
    files: tuple[str, ...]

    def __str__(self) -> str:
        numbers = [f"{self.num_lines:,} line{'s' if self.num_lines > 1 else ''} of numbers"] if self.num_lines else []
        return " and ".join([*numbers, *([", ".join(self.files)] if self.files else [])])


class Shipment:
    """Brings one run to one server, a piece at a time. Each piece may fail, and is then tried again as a whole.

    Args:
        tracking: The run, and how far it has got where.
        uri: The server.
        tell: Takes a line for the user.
        on_upload: Called before a file is sent, which may take long.

    Attributes:
        is_attached: Whether the server has answered, and the run is there.
    """

    def __init__(
        self, tracking: Tracking, uri: str, tell: Callable[[str], None], on_upload: Callable[[], None] = lambda: None
    ) -> None:
        self._tracking, self._uri, self._tell, self._on_upload = tracking, uri, tell, on_upload
        self._folder = tracking.folder
        self._at = tracking.at(uri)
        self._server: MlflowServer | None = None
        self.is_attached = False
        self._is_described = False
        self._renamed: set[str] = set()
        self._ahead = RowsAhead()

    def ship_numbers(self) -> bool:
        """Send the next lines of the journal; the first time also what is known of the run.

        Returns:
            Whether there may be more to send at once.
        """
        server, run_id = self._attached()
        if not self._is_described:
            self._describe(server, run_id)
        end, rows, is_full = self._at.acked, list[Row](), False
        ahead = self._ahead.copy()  # what is found counts once the server has answered
        for text, line_end in whole_lines(self._folder / JOURNAL, self._at.acked):
            found = self._rows(text)
            is_full = bool(rows) and len(rows) + len(found) > MAX_METRICS
            if is_full:
                break
            rows, end = rows + ahead.without(found), line_end
        if end == self._at.acked:
            return False
        is_full = is_full or end - self._at.acked >= MAX_READ_BYTES // 2
        self._at.sent = max(end, self._at.sent)  # first: whoever resumes after a kill must know that it may be there
        self._tracking.write()
        refused = server.log_rows(run_id, rows) if rows else []
        if refused:
            names = ", ".join(sorted({row.key for row in refused}))
            self._tell(f"{len(refused)} numbers are not taken by the tracking server: {names}")
        self._at.acked, self._ahead = end, ahead
        if not ahead:
            self._at.ahead_since_ms = None
        self._tracking.write()
        return is_full

    def ship_files(self, *, is_over: bool, with_model: bool) -> list[Trouble]:
        """Send files that are new or have changed.

        Args:
            is_over: Whether the run is over: then also the files that a run leaves at its end.
            with_model: Also the best model.

        Returns:
            What could not be sent although the server is there, and why.
        """
        server, run_id = self._attached()
        troubles = []
        for path in _files(self._folder, is_over=is_over, with_model=with_model and self._tracking.about.log_model):
            mark = _mark(path)
            if self._at.artifacts.get(path.name) == mark:
                continue
            self._on_upload()
            try:
                if path.is_dir():
                    server.patiently(lambda path=path: self._log_model(server, run_id, path))  # type: ignore[misc]
                else:
                    server.log_file(run_id, path)
            except Exception as error:
                server.client.get_run(run_id)  # fails if it is the server that is away, and not its files
                trouble = trouble_of(error, self._uri)
                troubles.append(Trouble(trouble.kind, f"{path.name}: {trouble.words}", trouble.cure))
                continue
            self._at.artifacts[path.name] = mark
            self._tracking.write()
        return troubles

    def close(self) -> None:
        """Say how the run stands, or how it ended."""
        server, run_id = self._attached()
        state, reason = how_it_stands(self._folder)
        status = _STATUSES[state]
        run = read_status(self._folder) or {}
        tags = {f"trimtab.{key}": str(run[key]) for key in _SUMMARY if run.get(key) is not None}
        if status == "FAILED":
            tags[ERROR_TAG] = reason or "not known"
        else:
            server.drop_tag(run_id, ERROR_TAG)
        server.set_tags(run_id, tags | {"trimtab.state": state})
        server.set_status(run_id, status, int(run.get("updated", time.time()) * 1000))
        self._at.status = status
        self._tracking.write()

    def progress(self) -> tuple[Any, ...]:
        """Another value whenever something has been sent."""
        return self._at.run_id, self._at.params, self._at.acked, len(self._at.artifacts), self._at.status

    def _attached(self) -> tuple[MlflowServer, str]:
        """The server, and the run there: made once, and found again afterwards."""
        if self._server is None:
            self._server = MlflowServer(self._uri)
        about, at = self._tracking.about, self._at
        if self.is_attached and at.run_id is not None:
            return self._server, at.run_id
        if at.run_id is not None and not self._is_there(at.run_id):
            at.forget()
        if at.run_id is None:
            at.experiment, at.experiment_id = about.experiment, self._server.experiment_id(about.experiment)
            at.run_id = self._server.open_run(at.experiment_id, about.name, about.run, about.started_ms, about.parent)
        if how_it_stands(self._folder)[0] == "running":
            self._server.drop_tag(at.run_id, ERROR_TAG)  # of an end that was none
            self._server.set_status(at.run_id, "RUNNING")
            at.status = "RUNNING"
        size = (self._folder / JOURNAL).stat().st_size
        at.acked, at.sent = min(at.acked, size), min(at.sent, size)  # a journal that has lost its end
        is_news = at.ahead_since_ms is None
        self._ahead = look_ahead(self._server, at.run_id, self._folder, at)
        if self._ahead and is_news:
            first, last = self._ahead.steps[0], self._ahead.steps[-1]
            self._tell(f"{at.uri} has numbers of steps {first:,}-{last:,} already: they are not sent a second time")
        self._tracking.write()
        self.is_attached = True
        return self._server, at.run_id

    def _is_there(self, run_id: str) -> bool:
        assert self._server is not None
        try:
            found = self._server.client.get_run(run_id)
        except Exception as error:
            if trouble_of(error, self._uri).kind != "gone":
                raise
            self._tell(f"{self._at.uri} does not know the run any more: its whole history is sent again")
            return False
        if found.info.lifecycle_stage == "deleted":
            self._tell(f"the run was deleted on {self._at.uri}: its whole history is sent again")
            return False
        return True

    def start_anew(self) -> None:
        """The server has lost the run while it was written to: look again."""
        self.is_attached = self._is_described = False

    def _describe(self, server: MlflowServer, run_id: str) -> None:
        about = self._tracking.about
        params = about.params or _params_of_journal(self._folder / JOURNAL)
        changed = server.log_params(run_id, params)
        tags = dict(about.tags)
        if changed:
            tags["trimtab.changed"] = "; ".join(f"{key}: {was} → {now}" for key, (was, now) in changed.items())
        server.set_tags(run_id, tags)
        self._at.params = True
        self._tracking.write()
        self._is_described = True

    def _rows(self, text: bytes) -> list[Row]:
        rows = rows_of(text)
        for row in rows:
            if valid_key(row.key) != row.key and row.key not in self._renamed:
                self._renamed.add(row.key)
                self._tell(f"the metric {row.key!r} is {valid_key(row.key)!r} on the tracking server")
        return [Row(valid_key(row.key), row.value, row.timestamp_ms, row.step) for row in rows]

    def _log_model(self, server: MlflowServer, run_id: str, folder: Path) -> None:
        from trimtab.tracking.mlflow.best_model import log_best_model

        about = self._tracking.about
        facts = json.loads((folder / "trimtab.json").read_text())
        metric = about.metric or facts.get("metric") or "loss"
        value = facts.get("metrics", {}).get(metric)
        log_best_model(
            server.client,
            run_id,
            folder,
            register=about.register,
            metric=metric,
            value=value if isinstance(value, int | float) else None,
            higher_is_better=_rises(metric, about, read_status(self._folder) or {}),
            tell=self._tell,
        )


def _rises(metric: str, about: About, status: Mapping[str, Any]) -> bool | None:
    """Whether more of a metric is better; None of one that the user has made, if the run did not say it."""
    from trimtab.data.metrics import higher_is_better  # and torch, for which nobody waits before the end

    if about.higher_is_better is not None:
        return about.higher_is_better
    if status.get("metric_name") == metric and status.get("higher_is_better") is not None:
        return bool(status["higher_is_better"])
    try:
        return higher_is_better(metric)
    except RecipeError:
        return None


def what_waits(tracking: Tracking, uri: str, *, with_model: bool) -> Waiting:
    """What a server does not have yet of a run that is over."""
    at = tracking.at(uri)
    num_lines = sum(1 for text, _ in whole_lines(tracking.folder / JOURNAL, at.acked, whole=True) if rows_of(text))
    files = _files(tracking.folder, is_over=True, with_model=with_model and tracking.about.log_model)
    missing = [path.name for path in files if at.artifacts.get(path.name) != _mark(path)]
    return Waiting(num_lines, tuple("the best model" if name == _MODEL else name for name in missing))


def _params_of_journal(path: Path) -> dict[str, str]:
    """The recipe that a journal begins with, for a run that was not tracked when it was trained."""
    first = next((text for text, _ in whole_lines(path, 0)), b"{}")
    try:
        return flat_params(json.loads(first).get("config") or {})
    except (ValueError, AttributeError):
        return {}


def flat_params(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Values by dotted key, as text."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            found |= flat_params(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return found


def _files(folder: Path, *, is_over: bool, with_model: bool) -> list[Path]:
    names = [*_FIRST_FILES, *(_LAST_FILES if is_over else ())]
    files = [path for name in names for path in sorted(folder.glob(name)) if path.is_file()]
    model = folder / _MODEL
    return [*files, model] if is_over and with_model and (model / "trimtab.json").is_file() else files


def _mark(path: Path) -> str:
    """What changes when a file does; of a model, which is large, the facts about it and the sizes of its files."""
    if path.is_dir():
        sizes = sorted((inner.name, inner.stat().st_size) for inner in path.iterdir() if inner.is_file())
        return hashlib.sha256((path / "trimtab.json").read_bytes() + repr(sizes).encode()).hexdigest()
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_tracking(folder: Path, about: About, uri: str) -> Tracking:
    """What a folder says of its tracking, with what is known now; the name of a run and its beginning stay.

    The server is written down before it is reached: `track sync` has to know which one was meant.
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


def ship_all(tracking: Tracking, uri: str, tell: Callable[[str], None]) -> list[Trouble]:
    """Bring a whole run to a server, now and here.

    Returns:
        Files that could not be sent, and why.
    """
    shipment = Shipment(tracking, uri, tell)
    while shipment.ship_numbers():
        pass
    is_over = how_it_stands(tracking.folder)[0] != "running"
    troubles = shipment.ship_files(is_over=is_over, with_model=True)
    shipment.close()
    return troubles


def close_killed(folders: Iterable[Path], uri: str) -> None:
    """Close the runs of other folders that were killed and stand on the server as if they were running."""
    for folder in folders:
        tracking = Tracking.read(folder) if (folder / TRACKING).is_file() else None
        if tracking is None or how_it_stands(folder)[0] != "killed":
            continue
        shown = redact(uri)
        if not any(one.uri == shown and one.run_id and one.status == "RUNNING" for one in tracking.attachments):
            continue
        with contextlib.suppress(CheckpointError), shipping(folder, patience_s=0.0):
            Shipment(tracking, uri, lambda text: None).close()
