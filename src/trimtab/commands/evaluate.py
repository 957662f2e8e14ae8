"""`trimtab evaluate`: judge a model on labelled rows, alone or against another one on the same rows."""

import gc
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.addresses import redact
from trimtab.build.data import run_name
from trimtab.commands.held_out import held_out_of
from trimtab.errors import RecipeError, TrimtabError, UserError
from trimtab.hardware.inventory import find_device
from trimtab.inference.bootstrap import PairedDifference
from trimtab.inference.evaluate import Evaluation, evaluate, same_rows
from trimtab.inference.load import load
from trimtab.recipe.schema import Recipe
from trimtab.runs.run_folder import find_run
from trimtab.runs.tracking_file import Tracking
from trimtab.tracking.mlflow.model_folder import quiet_mlflow
from trimtab.tracking.mlflow.server import MlflowServer, Row, describe_failure, mlflow_environment
from trimtab.tracking.mlflow.uri import default_uri, tracking_uri

_PREFIX = "test_"  # eval_ belongs to the rows that select the best model of a run
_MAX_LABELS = 100  # whose scores are tracked one by one


@dataclass(frozen=True)
class Judged:
    """The result of `trimtab evaluate`.

    Args:
        model: The model that was asked for.
        facts: What trimtab.json says about it.
        evaluation: Its evaluation.
        other: The second model; None if there is none.
        against: The evaluation of the second model.
        differences: The paired test of each metric, second against first.
    """

    model: str
    facts: Mapping[str, Any]
    evaluation: Evaluation
    other: str | None = None
    against: Evaluation | None = None
    differences: Mapping[str, PairedDifference] | None = None


def judge(
    model: str,
    data: Any = None,
    *,
    against: str | None = None,
    text: str | Sequence[str] | None = None,
    label: str | Sequence[str] | None = None,
    num_rows: int | None = None,
    num_worst: int = 10,
    device: str | torch.device | None = None,
) -> Judged:
    """Evaluate a model, and compare it with another one on the same rows.

    Args:
        model: A run, a folder, a hub name or a model on a tracking server.
        data: Labelled rows; by default those that the run of the model held out.
        against: A second model.
        text: Column of the text; by default that of the training rows, or guessed.
        label: Column of the label, in the same way.
        num_rows: Use a random choice of at most this number of rows.
        num_worst: Number of rows with the highest loss to list.
        device: Where to compute; None chooses.
    """
    if num_rows is not None and num_rows < 1:
        raise RecipeError(f"--rows {num_rows} leaves no rows", "--rows 1 or more")
    if num_worst < 0:
        raise RecipeError(f"--worst {num_worst} is negative", "--worst 0 or more")
    where = find_device(device)
    loaded = load(model, device=where)
    facts = loaded.facts
    held_out = held_out_of(loaded, data, num_rows, text=text, label=label)
    first = evaluate(loaded, held_out, num_worst=num_worst)
    if against is None:
        return Judged(model, facts, first)
    del loaded
    gc.collect()  # frees the first model, which has reference cycles
    other = load(against, device=where)
    second = evaluate(other, same_rows(held_out, other), num_worst=num_worst)
    return Judged(model, facts, first, against, second, first.compare_with(second))


def track(judged: Judged, files: Sequence[Path]) -> str:
    """Log an evaluation to MLflow: a run of its own in the experiment of the model's run, below that run.

    Metrics have the prefix test_, so that they never select the best model of an experiment.

    Args:
        judged: The evaluation.
        files: Files to upload.

    Returns:
        A line on where it is.

    Raises:
        RecipeError: If tracking is switched off.
        TrimtabError: If the server cannot be reached or refuses.
    """
    uri, experiment, parent = _place(judged)
    params = {"model": judged.model, "data": judged.evaluation.origin, "rows": str(judged.evaluation.num_rows)}
    if judged.other is not None:
        params["against"] = judged.other
    with mlflow_environment(), quiet_mlflow():
        try:
            server = MlflowServer(uri)
            now = int(time.time() * 1000)
            name = f"evaluate {Path(judged.model).name}"
            run_id = server.open_run(server.experiment_id(experiment), name, uuid.uuid4().hex, now, parent)
            server.log_params(run_id, params)
            server.log_rows(run_id, [Row(key, value, now, 0) for key, value in _tracked_metrics(judged).items()])
            for file in files:
                server.log_file(run_id, file)
            server.set_status(run_id, "FINISHED")
        except TrimtabError:
            raise
        except Exception as error:
            trouble = describe_failure(error, uri)
            raise (UserError(trouble.words, trouble.cure) if trouble.cure else TrimtabError(str(trouble))) from error
    return f"tracked on {redact(uri)}: experiment {experiment}, run {run_id}"


def _place(judged: Judged) -> tuple[str, str, str | None]:
    """Return the server, the experiment, and the MLflow run of the model's training if it is there."""
    path = Path(judged.model)
    folder = next((place for place in (path, path.parent) if find_run(place) is not None), None)
    settings = judged.facts.get("recipe")
    recipe = Recipe(**settings) if isinstance(settings, Mapping) else None
    experiment = "evaluate" if recipe is None else run_name(recipe)
    if folder is None:
        return default_uri(), experiment, None
    uri = tracking_uri("local" if recipe is None else recipe.track.uri, folder)
    if uri is None:
        raise RecipeError(f"tracking is switched off for {folder}", "unset TRIMTAB_TRACK, or set track.uri")
    tracking = Tracking.read(folder)
    states = [] if tracking is None else [state for state in tracking.servers if state.uri == redact(uri)]
    return uri, states[0].experiment or experiment if states else experiment, states[0].run_id if states else None


def _tracked_metrics(judged: Judged) -> dict[str, float]:
    found = judged.evaluation
    values = dict(found.metrics)
    for name, (low, high) in found.intervals.items():
        values |= {f"{name}_low": low, f"{name}_high": high}
    if len(found.by_label) <= _MAX_LABELS:
        values |= {f"f1/{each.label}": each.f1 for each in found.by_label}
    for name, difference in (judged.differences or {}).items():
        values |= {f"{name}_difference": difference.second - difference.first, f"{name}_p": difference.p_value}
    return {f"{_PREFIX}{name}": value for name, value in values.items() if math.isfinite(value)}
