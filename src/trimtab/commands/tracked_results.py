"""Log results about a model to MLflow: a nested run below the model's run, in the same experiment."""

import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.addresses import redact
from trimtab.build.consent import check_address_is_given
from trimtab.build.data import run_name
from trimtab.errors import RecipeError, TrimtabError, UserError, as_argument
from trimtab.log import quiet_package
from trimtab.recipe.schema import Recipe
from trimtab.runs.run_folder import find_run
from trimtab.runs.tracking_file import Tracking
from trimtab.tracking.mlflow.server import MlflowServer, Row, describe_failure, mlflow_environment
from trimtab.tracking.mlflow.uri import default_uri, tracking_uri

_PREFIX = "test_"  # so that no such metric ever selects the best model of an experiment


@dataclass(frozen=True)
class Results:
    """The contents of one MLflow run.

    Args:
        name: Name of the run.
        params: Its parameters.
        metrics: Its metrics; those that are not finite are left out.
        files: Files to upload.
        parts: Results that become runs below this one.
        curves: Values by step.
        has_failed: Whether the run is shown as failed.
    """

    name: str
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    files: Sequence[Path] = ()
    parts: Sequence["Results"] = field(default=())
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    has_failed: bool = False


def track_results(model: str, facts: Mapping[str, Any], results: Results) -> str:
    """Log results about a model.

    Args:
        model: The model, as the user named it.
        facts: The contents of its trimtab.json.
        results: The results.

    Returns:
        A line that says where they are.

    Raises:
        RecipeError: If tracking is disabled.
        TrimtabError: If the server cannot be reached, or rejects the data.
    """
    return log_results(results, *_place(model, facts))


def log_results(results: Results, uri: str, experiment: str, parent: str | None = None) -> str:
    """Log results.

    Args:
        results: The results.
        uri: The server.
        experiment: Name of the experiment.
        parent: Id of the parent run.

    Returns:
        A line that says where they are.

    Raises:
        TrimtabError: If the server cannot be reached, or rejects the data.
    """
    with mlflow_environment(uri), quiet_package("mlflow"):
        try:
            server = MlflowServer(uri)
            run_id = _log(server, server.experiment_id(experiment), results, parent)
        except TrimtabError:
            raise
        except Exception as error:
            trouble = describe_failure(error, uri)
            raise (UserError(trouble.words, trouble.cure) if trouble.cure else TrimtabError(str(trouble))) from error
    return f"tracked on {redact(uri)}: experiment {experiment}, run {run_id}"


def _log(server: MlflowServer, experiment_id: str, results: Results, parent: str | None) -> str:
    now = int(time.time() * 1000)
    run_id = server.open_run(experiment_id, results.name, uuid.uuid4().hex, now, parent)
    server.log_params(run_id, results.params)
    points = [(name, 0, value) for name, value in results.metrics.items()]
    points += [(name, step, value) for name, curve in results.curves.items() for step, value in curve]
    rows = [Row(f"{_PREFIX}{name}", value, now, step) for name, step, value in points if math.isfinite(value)]
    server.log_rows(run_id, rows)
    for file in results.files:
        server.log_file(run_id, file)
    for part in results.parts:
        _log(server, experiment_id, part, run_id)
    server.set_status(run_id, "FAILED" if results.has_failed else "FINISHED")
    return run_id


def _place(model: str, facts: Mapping[str, Any]) -> tuple[str, str, str | None]:
    """Return the server, the experiment, and the MLflow run of the model's training if it exists there."""
    path = Path(model)
    folder = next((place for place in (path, path.parent) if find_run(place) is not None), None)
    settings = facts.get("recipe")
    recipe = Recipe(**settings) if isinstance(settings, Mapping) else None
    experiment = "evaluate" if recipe is None else recipe.track.experiment or run_name(recipe)
    if folder is None:
        return default_uri(), experiment, None
    uri = tracking_uri("local" if recipe is None else recipe.track.uri, folder)
    if uri is None:
        raise RecipeError(f"tracking is switched off for {folder}", "unset TRIMTAB_TRACK, or set track.uri")
    cure = f"if you trust it: trimtab track sync {as_argument(folder)} --to {as_argument(redact(uri))}"
    check_address_is_given(folder, uri, cure)
    tracking = Tracking.read(folder)
    states = [] if tracking is None else [state for state in tracking.servers if state.uri == redact(uri)]
    return uri, states[0].experiment or experiment if states else experiment, states[0].run_id if states else None
