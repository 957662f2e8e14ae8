"""Rank the runs of an experiment on a tracking server by a metric."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trimtab.addresses import redact
from trimtab.data.metrics import higher_is_better
from trimtab.errors import RecipeError, UserError
from trimtab.tracking.mlflow.best_model import HIGHER_IS_BETTER, METRIC, METRICS, VALUE
from trimtab.tracking.mlflow.server import is_databricks

if TYPE_CHECKING:
    from mlflow import MlflowClient

_PAGE = 100  # results per request, which every MLflow search allows
_EVAL = "eval_"  # prefix of metrics on eval rows in the journal
_NAME_IT = "set the metric: --metric accuracy, or best:EXPERIMENT?metric=accuracy"


@dataclass(frozen=True)
class TrackedRun:
    """A run on a tracking server.

    Attributes:
        run_id: MLflow's id.
        name: Its name.
        status: RUNNING, FINISHED, KILLED or FAILED.
        started_ms: Start time, in Unix milliseconds.
        value: Metric of its best model, or the best of all evaluations if it has logged no model.
        model_id: Id of its best model; None if it has logged none.
    """

    run_id: str
    name: str
    status: str
    started_ms: int
    value: float | None
    model_id: str | None


@dataclass(frozen=True)
class Ranking:
    """The runs of an experiment, best first; those without a value of the metric last."""

    experiment: str
    uri: str
    metric: str
    higher_is_better: bool
    runs: tuple[TrackedRun, ...]

    @property
    def winner(self) -> TrackedRun:
        """The best run."""
        return self.runs[0]


def rank_experiment(client: "MlflowClient", uri: str, name: str, metric: str | None) -> Ranking:
    """Rank the runs of an experiment, as `rank_runs` describes."""
    experiment = client.get_experiment_by_name(name)
    if experiment is None and is_databricks(uri):
        experiment = client.get_experiment_by_name(f"/Shared/{name}")
    if experiment is None or experiment.lifecycle_stage == "deleted":
        names = [known.name for known in client.search_experiments()]
        raise RecipeError(f"{redact(uri)} has no experiment {name!r}", suggest_names(name, names, "it has"))
    ids = [experiment.experiment_id]
    runs = all_pages(client.search_runs, ids)
    complete = [
        model
        for model in all_pages(client.search_logged_models, ids)
        if str(model.status) == "READY" and model.source_run_id
    ]
    models = {model.source_run_id: model for model in sorted(complete, key=lambda model: model.creation_timestamp)}
    metric = metric.removeprefix(_EVAL) if metric is not None else _selecting_metric(name, models)
    found = [_tracked_run(client, run, models.get(run.info.run_id), metric) for run in runs]
    rises = _is_higher_better(metric, [model for model in models.values() if model.tags.get(METRIC) == metric])
    if not any(run.value is not None for run in found):
        known = {key.removeprefix(_EVAL) for run in runs for key in run.data.metrics if key.startswith(_EVAL)}
        known |= {key for model in models.values() for key in _metrics_of(model)}
        why = f"no run of {name} has a value of {metric}" if runs else f"{name} has no runs"
        cure = suggest_names(metric, sorted(known), "they have") if known else "run an evaluation first"
        raise RecipeError(why, cure)

    def order(run: TrackedRun) -> tuple[bool, float, int]:  # older runs come first among equals
        value = 0.0 if run.value is None else run.value
        return run.value is None, -value if rises else value, run.started_ms

    return Ranking(name, uri, metric, rises, tuple(sorted(found, key=order)))


def all_pages(search: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a search method of the client until it has no more results."""
    from mlflow.utils import get_results_from_paginated_fn

    def page(max_results: int, token: str | None) -> Any:
        return search(*arguments, max_results=max_results, page_token=token)

    return list(get_results_from_paginated_fn(page, _PAGE))  # type: ignore[no-untyped-call]


def _metrics_of(model: Any) -> dict[str, float]:
    """Return the metrics of a logged model itself."""
    metrics: dict[str, Any] = {}
    with suppress(ValueError):  # the tag was cut, or written by another program
        metrics = json.loads(model.tags.get(METRICS) or "{}")
    with suppress(ValueError, LookupError):
        metrics[model.tags[METRIC]] = float(model.tags[VALUE])
    return {key: value for key, value in metrics.items() if isinstance(value, int | float)}


def _tracked_run(client: "MlflowClient", run: Any, model: Any, metric: str) -> TrackedRun:
    info = run.info
    value = None if model is None else _metrics_of(model).get(metric)
    if value is None:
        key = next((key for key in (f"{_EVAL}{metric}", metric) if key in run.data.metrics), None)
        if key is not None:
            values = [row.value for row in client.get_metric_history(info.run_id, key) if math.isfinite(row.value)]
            rises = _is_higher_better(metric, [] if model is None else [model])
            value = (max if rises else min)(values) if values else None
    return TrackedRun(
        run_id=info.run_id,
        name=info.run_name or info.run_id,
        status=info.status,
        started_ms=info.start_time or 0,
        value=value if value is not None and math.isfinite(value) else None,
        model_id=None if model is None else model.model_id,
    )


def _selecting_metric(experiment: str, models: Mapping[str, Any]) -> str:
    """Return the metric that selected the models of an experiment."""
    metrics = list(dict.fromkeys(str(model.tags[METRIC]) for model in models.values() if METRIC in model.tags))
    if len(metrics) == 1:
        return metrics[0]
    if metrics:
        raise RecipeError(
            f"the models of {experiment} were selected by several metrics: {', '.join(metrics)}", _NAME_IT
        )
    raise RecipeError(f"no run of {experiment} has logged a model, so its metric is unknown", _NAME_IT)


def _is_higher_better(metric: str, models: Sequence[Any]) -> bool:
    """Return the direction of a metric: as recorded by the models, else by its name."""
    recorded = {model.tags.get(HIGHER_IS_BETTER) for model in models} - {None}
    if len(recorded) == 1 and {model.tags.get(METRIC) for model in models} == {metric}:
        return recorded == {"true"}
    try:
        return higher_is_better(metric)
    except UserError:
        return True


def suggest_names(name: str, names: Sequence[str], prefix: str) -> str:
    """Return a cure for an unknown name: similar names, else the first that exist."""
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{prefix} {', '.join(sorted(names)[:8]) or 'none'}"
