"""MLflow for the user's own training loop: `Engine(log_with="mlflow")`.

Values are written to the journal of a run folder, and the uploader process sends them from there to the server, by the
same rules as for a recipe's `track`. So the loop never waits for the server, and an outage loses nothing.
"""

import atexit
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import RecipeError, as_argument
from trimtab.hardware.environment import describe_environment
from trimtab.log import printable, say
from trimtab.runs.journal import plain
from trimtab.runs.run_folder import RunFolder, default_folder, is_own_loop, read_status
from trimtab.runs.tracking_file import RunDescription, Tracking
from trimtab.runs.uploader import NoUploader
from trimtab.tracking.mlflow.origin_tags import origin_tags
from trimtab.tracking.mlflow.uri import RUNS, tracking_uri
from trimtab.tracking.upload.run_upload import flatten_params
from trimtab.tracking.upload.uploader import MlflowUploader

_NO_RUN = "call engine.init_trackers(PROJECT) first"


class MlflowTracker:
    """Write a run to a folder, ROOT/PROJECT/NAME, which is uploaded to MLflow.

    `finish` sets the run to FINISHED. If an exception ends the program first, the run is FAILED, with the reason, or
    KILLED after Ctrl-C; if the process is killed, the run is FAILED.

    Args:
        root: Parent of the project folders; by default `runs`.
    """

    name = "mlflow"

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(RUNS)
        self._uri, self._resume = "local", False
        self._run_name: str | None = None
        self._parent: str | None = None
        self._tags: dict[str, str] = {}
        self._run: RunFolder | None = None
        self._error_at_start: BaseException | None = None
        self._process_id = 0

    def set_up(
        self,
        *,
        uri: str | None = None,
        run_name: str | None = None,
        parent: str | None = None,
        nested_run: bool = False,
        resume: bool = False,
        tags: dict[str, Any] | None = None,
        description: str | None = None,
        logging_dir: str | Path | None = None,
        **others: Any,
    ) -> None:
        """Set options for the next `start`: `init_trackers(…, init_kwargs={"mlflow": {…}})`.

        Args:
            uri: The server, as a recipe's `track.uri`: local (the default), none, http://…, sqlite:///…, databricks.
            run_name: Name of the run and of its folder; by default the next free number.
            parent: MLflow's id of the parent run.
            nested_run: Whether to use the run that is active in mlflow as parent.
            resume: Whether to resume the run of that name, also on the server; if there is none, it is started. Lines
                of repeated steps that equal existing ones are not written again.
            tags: Additional tags.
            description: Description in MLflow's UI.
            logging_dir: Parent of the project folders, instead of the engine's project_dir.
            others: Unknown options, which are refused.

        Raises:
            RecipeError: An option is unknown or invalid.
        """
        if others:
            known = "uri, run_name, parent, nested_run, resume, tags, description, logging_dir"
            cure = "to resume a run, pass resume=True and its run_name" if "run_id" in others else f"it takes {known}"
            raise RecipeError(f"init_kwargs['mlflow'] has {', '.join(sorted(others))}, which is not supported", cure)
        if resume and run_name is None:
            raise RecipeError("resume=True needs the name of the run", "pass run_name=…")
        if run_name is not None and (not run_name.strip("./ ") or "/" in run_name or printable(run_name) != run_name):
            cure = "leave out slashes, line breaks and other control characters"
            raise RecipeError(f"run_name={run_name!r} is not a valid folder name", cure)
        self._uri = uri or self._uri
        self._run_name, self._resume = run_name, resume
        self._parent = _active_run() if nested_run and parent is None else parent
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        if description is not None:
            self._tags["mlflow.note.content"] = description
        self._root = self._root if logging_dir is None else Path(logging_dir)

    @property
    def folder(self) -> Path:
        """The run folder."""
        if self._run is None:
            raise RecipeError("there is no run", _NO_RUN)
        return self._run.path

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the server has responded, which may be seconds after `start`."""
        tracking = Tracking.read(self.folder)
        return tracking.servers[-1].run_id if tracking is not None and tracking.servers else None

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Create the run folder and start the uploader process, without waiting for it."""
        self.finish()
        path = self._choose_folder(project_name)
        resumes = self._resume and read_status(path) is not None
        self._run = RunFolder(path, resumes=resumes)
        params = json.loads(json.dumps(config or {}, default=plain))
        if resumes:
            self._run.resume_own_loop()
        else:
            self._run.start(params, num_steps=0)
        self._run.update(own_loop=True)
        uri = tracking_uri(self._uri, self._root / project_name)  # not `path`: all projects share one local store
        device = "cuda" if torch.cuda.is_available() else "cpu"
        facts = describe_environment(device, torch.get_num_threads())
        about = RunDescription(
            run=(read_status(path) or {})["id"],
            name=self._run_name or path.name,
            experiment=project_name,
            parent=self._parent,
            params=flatten_params(params),
            tags={
                **origin_tags(path),
                "trimtab.hardware": facts["hardware"],
                "trimtab.versions": facts["versions"],
                **self._tags,
            },
            log_model=False,
        )
        self._run.track(NoUploader() if uri is None else MlflowUploader(path, uri, about))
        self._error_at_start, self._process_id = _last_error(), os.getpid()
        atexit.register(self._on_exit)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write values to the journal."""
        if self._run is None:
            raise RecipeError("log was called before init_trackers", _NO_RUN)
        self._run.record(values, step)

    def finish(self) -> None:
        """End the run successfully."""
        self._end("finished")

    def _end(self, state: str, **facts: Any) -> None:
        atexit.unregister(self._on_exit)
        run, self._run = self._run, None
        if run is not None:
            run.finish(state, **facts)

    def _on_exit(self) -> None:
        """End a run for which `finish` was not called."""
        if os.getpid() != self._process_id:
            return  # a forked child: the run belongs to its parent
        error = _last_error()
        if error is None or error is self._error_at_start:
            say("end_training was not called: the run is recorded as finished")
            self._end("finished")
        else:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._end(state, error=f"{type(error).__name__}: {error}")

    def _choose_folder(self, project_name: str) -> Path:
        if self._run_name is None:
            return default_folder(self._root, project_name, None)
        path = self._root / project_name / self._run_name
        if self._resume:
            status = read_status(path)
            if status is not None and not is_own_loop(status):
                raise RecipeError(f"{path} is a run of a recipe", f"resume it with: trimtab resume {as_argument(path)}")
            return path
        # unlike names in MLflow, folders must be unique
        numbered = (path.with_name(f"{self._run_name}-{number}") for number in itertools.count(2))
        return next(free for free in itertools.chain([path], numbered) if not free.exists())


def _active_run() -> str:
    """Return the id of the run that is active in mlflow, without importing mlflow."""
    active = sys.modules["mlflow"].active_run() if "mlflow" in sys.modules else None
    if active is None:
        raise RecipeError("nested_run=True, but no run is active in mlflow", "pass the ID of the parent run: parent=…")
    return str(active.info.run_id)


def _last_error() -> BaseException | None:
    """Return the unhandled exception that ends the program, or the last one of a notebook."""
    return getattr(sys, "last_value", None)
