"""MLflow for a loop of one's own: `Engine(log_with="mlflow")`.

Values go into the journal of a run's folder, and a process beside the loop brings them from there to the server: the
loop never waits for it, and an outage costs nothing. The rules are those of a recipe's `track`.
"""

import atexit
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.surroundings import describe_surroundings
from trimtab.log import say
from trimtab.runs.journal import plain
from trimtab.runs.run_folder import RunFolder, default_folder, is_own_loop, read_status
from trimtab.tracking.mlflow.origin_tags import origin_tags
from trimtab.tracking.mlflow.uri import RUNS, tracking_uri
from trimtab.tracking.upload.attachment import About, Tracking
from trimtab.tracking.upload.shipper import flat_params
from trimtab.tracking.upload.uploader import MlflowCompanion, NoCompanion

_NO_RUN = "call engine.init_trackers(PROJECT) first"


class MlflowTracker:
    """A tracker that keeps a run in a folder, and has it brought to MLflow.

    The folder is ROOT/PROJECT/NAME. `finish` closes the run as FINISHED. A program that ends by an exception leaves it
    FAILED, with the reason, or KILLED for Ctrl-C; after a kill it is FAILED, too.

    Args:
        root: Where runs go; by default `runs`.
    """

    name = "mlflow"

    def __init__(self, root: Path | None = None) -> None:
        self._root = root or Path(RUNS)
        self._uri, self._resume = "local", False
        self._run_name: str | None = None
        self._parent: str | None = None
        self._tags: dict[str, str] = {}
        self._run: RunFolder | None = None
        self._seen: BaseException | None = None
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
        """Settings for the next `start`: `init_trackers(…, init_kwargs={"mlflow": {…}})`.

        Args:
            uri: The server, as a recipe's `track.uri`: local (the default), none, http://…, sqlite:///…, databricks.
            run_name: The run's name, which is also that of its folder; by default the next free number.
            parent: MLflow's id of the run that this one is a part of.
            nested_run: The parent is the run that is active in mlflow itself.
            resume: Go on with the run of that name, if there is one, on the server too; else another one begins. Lines
                that come again as they were, of steps that are taken again, are not written a second time.
            tags: Further tags.
            description: What MLflow's page says of the run.
            logging_dir: Where runs go, in the place of the engine's project_dir.
            others: Named in the error that they are.

        Raises:
            RecipeError: A setting is not known, or cannot be followed.
        """
        if others:
            known = "uri, run_name, parent, nested_run, resume, tags, description, logging_dir"
            cure = "resume=True with its run_name goes on with a run" if "run_id" in others else f"it takes {known}"
            raise RecipeError(f"init_kwargs['mlflow'] has {', '.join(sorted(others))}, which is not known", cure)
        if resume and run_name is None:
            raise RecipeError("resume=True does not say which run", "name it: run_name=…")
        if run_name is not None and (not run_name.strip("./ ") or "/" in run_name):
            raise RecipeError(f"run_name={run_name!r} is no name of a folder", "leave out slashes")
        self._uri = uri or self._uri
        self._run_name, self._resume = run_name, resume
        self._parent = _active_run() if nested_run and parent is None else parent
        self._tags = {key: str(value) for key, value in (tags or {}).items()}
        if description is not None:
            self._tags["mlflow.note.content"] = description
        self._root = self._root if logging_dir is None else Path(logging_dir)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        if self._run is None:
            raise RecipeError("there is no run", _NO_RUN)
        return self._run.path

    @property
    def run_id(self) -> str | None:
        """MLflow's id of the run; None until the server has answered, which may be seconds after `start`."""
        tracking = Tracking.read(self.folder)
        return tracking.attachments[-1].run_id if tracking is not None and tracking.attachments else None

    def start(self, project_name: str, config: dict[str, Any] | None) -> None:
        """Make the run's folder, and start the process that ships it; the loop does not wait for that."""
        self.finish()
        path = self._place(project_name)
        goes_on = self._resume and read_status(path) is not None
        self._run = RunFolder(path, goes_on=goes_on)
        tidy = json.loads(json.dumps(config or {}, default=plain))
        if goes_on:
            self._run.go_on()
        else:
            self._run.start(tidy, num_steps=0)
        self._run.update(own_loop=True)
        # asked here, and not of what is above: one store for all projects
        uri = tracking_uri(self._uri, self._root / project_name)
        about = About(
            run=(read_status(path) or {})["id"],
            name=self._run_name or path.name,
            experiment=project_name,
            parent=self._parent,
            params=flat_params(tidy),
            tags={**origin_tags(path), **_facts(), **self._tags},
            log_model=False,
        )
        self._run.track(NoCompanion() if uri is None else MlflowCompanion(path, uri, about))
        self._seen, self._process_id = _unhandled(), os.getpid()
        atexit.register(self._end_of_the_program)

    def log(self, values: dict[str, Any], step: int | None = None) -> None:
        """Write values into the run's journal."""
        if self._run is None:
            raise RecipeError("log was called before init_trackers", _NO_RUN)
        self._run.record(values, step)

    def finish(self) -> None:
        """The run is over, and all is well."""
        self._end("finished")

    def _end(self, state: str, **facts: Any) -> None:
        atexit.unregister(self._end_of_the_program)
        run, self._run = self._run, None
        if run is not None:
            run.finish(state, **facts)

    def _end_of_the_program(self) -> None:
        """Python ends, and `finish` was not called."""
        if os.getpid() != self._process_id:
            return  # a child that was forked, and leaves the run to its parent
        error = _unhandled()
        if error is None or error is self._seen:
            say("end_training was not called: the run counts as finished")
            self._end("finished")
        else:
            state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
            self._end(state, error=f"{type(error).__name__}: {error}")

    def _place(self, project_name: str) -> Path:
        """The folder of the run: a new one, unless one is to go on."""
        if self._run_name is None:
            return default_folder(self._root, project_name, None)
        place = self._root / project_name / self._run_name
        if self._resume:
            there = read_status(place)
            if there is not None and not is_own_loop(there):
                raise RecipeError(f"{place} is no run of a loop of your own", "trimtab resume goes on with it")
            return place
        number = 2
        while place.exists():  # names need not be unique in MLflow, folders must
            place = place.with_name(f"{self._run_name}-{number}")
            number += 1
        return place


def _facts() -> dict[str, str]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = describe_surroundings(device, torch.get_num_threads())
    return {"trimtab.hardware": found["hardware"], "trimtab.versions": found["versions"]}


def _active_run() -> str:
    """The run that is active in mlflow; it is asked only where somebody has imported it."""
    active = sys.modules["mlflow"].active_run() if "mlflow" in sys.modules else None
    if active is None:
        raise RecipeError("nested_run=True, and no run is active in mlflow", "name its id: parent=…")
    run_id: str = active.info.run_id
    return run_id


def _unhandled() -> BaseException | None:
    """The exception that has ended the program, or the last one of a notebook."""
    found: BaseException | None = getattr(sys, "last_value", None)
    return found
