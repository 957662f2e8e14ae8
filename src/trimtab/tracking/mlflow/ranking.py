"""Which run of an experiment is the best: its runs as a tracking server knows them, ordered by a metric."""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from trimtab.addresses import redact
from trimtab.data.metrics import higher_is_better
from trimtab.errors import RecipeError, UserError
from trimtab.tracking.mlflow.best_model import HIGHER_IS_BETTER, METRIC, METRICS, VALUE

if TYPE_CHECKING:
    from mlflow import MlflowClient

_EVAL = "eval_"  # in front of metrics of held-out rows, in a run's numbers
_NAME_IT = "name the metric: --metric accuracy, best:EXPERIMENT?metric=accuracy"


@dataclass(frozen=True)
class TrackedRun:
    """A run as a server knows it.

    Args:
        run_id: MLflow's id.
        name: Its name.
        status: RUNNING, FINISHED, KILLED or FAILED.
        started_ms: When it began.
        value: Of the metric: that of its best model, or, where none was logged, the best of all evaluations.
        model_id: Of its best model; None where none was logged.
    """

    run_id: str
    name: str
    status: str
    started_ms: int
    value: float | None
    model_id: str | None


@dataclass(frozen=True)
class Ranking:
    """The runs of an experiment, the best first; those without a value of the metric last."""

    experiment: str
    uri: str
    metric: str
    higher_is_better: bool
    runs: tuple[TrackedRun, ...]

    @property
    def winner(self) -> TrackedRun:
        """The best run."""
        return self.runs[0]


def ranked(client: "MlflowClient", uri: str, name: str, metric: str | None) -> Ranking:
    """Order the runs of an experiment by a metric of held-out rows.

    Args:
        client: Of the server.
        uri: Its address.
        name: The experiment.
        metric: None is the one by which its models were chosen.

    Raises:
        RecipeError: If there is no such experiment, or no run has a value of that metric.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is None and uri.startswith("databricks"):
        experiment = client.get_experiment_by_name(f"/Shared/{name}")
    if experiment is None or experiment.lifecycle_stage == "deleted":
        names = [known.name for known in client.search_experiments()]
        raise RecipeError(f"{redact(uri)} has no experiment {name!r}", near_names(name, names, "it has"))
    runs = all_pages(lambda token: client.search_runs([experiment.experiment_id], page_token=token))
    models = _models_by_run(client, experiment.experiment_id)
    metric = _bare(metric) if metric is not None else _own_metric(name, models)
    found = [_tracked(client, run, models.get(run.info.run_id), metric) for run in runs]
    rises = _rises(metric, [model for model in models.values() if model.tags.get(METRIC) == metric])
    if not any(run.value is not None for run in found):
        known = {_bare(key) for run in runs for key in run.data.metrics if key.startswith(_EVAL)}
        known |= {key for model in models.values() for key in _metrics_of(model)}
        why = f"no run of {name} has a value of {metric}" if runs else f"{name} has no runs"
        raise RecipeError(why, near_names(metric, sorted(known), "they have") if known else "let one evaluate first")
    found.sort(key=lambda run: _place(run, rises))
    return Ranking(name, uri, metric, rises, tuple(found))


def _place(run: TrackedRun, rises: bool) -> tuple[bool, float, int]:
    """Of runs that are alike the first one leads."""
    value = 0.0 if run.value is None else run.value
    return run.value is None, -value if rises else value, run.started_ms


def all_pages(ask: Callable[[Any], Any]) -> list[Any]:
    """All that a search finds, page by page.

    Args:
        ask: Gives the page of a token; None is the first.
    """
    found, token = [], None
    while True:
        page = ask(token)
        found += page
        token = page.token
        if not token:
            return found


def _models_by_run(client: "MlflowClient", experiment_id: str) -> dict[str, Any]:
    """The model that each run logged last."""
    models = all_pages(lambda token: client.search_logged_models([experiment_id], page_token=token))
    whole = [model for model in models if str(model.status) == "READY" and model.source_run_id]
    return {model.source_run_id: model for model in sorted(whole, key=lambda model: model.creation_timestamp)}


def _metrics_of(model: Any) -> dict[str, float]:
    """What was measured of the model itself."""
    said: dict[str, Any] = {}
    with suppress(ValueError):  # cut, or written by others
        said = json.loads(model.tags.get(METRICS) or "{}")
    with suppress(ValueError, LookupError):
        said[model.tags[METRIC]] = float(model.tags[VALUE])
    return {key: value for key, value in said.items() if isinstance(value, int | float)}


def _tracked(client: "MlflowClient", run: Any, model: Any, metric: str) -> TrackedRun:
    info = run.info
    value = None if model is None else _metrics_of(model).get(metric)
    if value is None:
        key = next((key for key in (f"{_EVAL}{metric}", metric) if key in run.data.metrics), None)
        if key is not None:
            every = [one.value for one in client.get_metric_history(info.run_id, key) if math.isfinite(one.value)]
            rises = _rises(metric, [] if model is None else [model])
            value = (max if rises else min)(every) if every else None
    if value is not None and not math.isfinite(value):
        value = None
    return TrackedRun(
        run_id=info.run_id,
        name=info.run_name or info.run_id,
        status=info.status,
        started_ms=info.start_time or 0,
        value=value,
        model_id=None if model is None else model.model_id,
    )


def _bare(metric: str) -> str:
    return metric.removeprefix(_EVAL)


def _own_metric(experiment: str, models: Mapping[str, Any]) -> str:
    found = Counter(model.tags[METRIC] for model in models.values() if METRIC in model.tags)
    if len(found) == 1:
        return str(next(iter(found)))
    if found:
        names = ", ".join(found)
        raise RecipeError(f"the models of {experiment} were chosen by several metrics: {names}", _NAME_IT)
    raise RecipeError(f"no run of {experiment} has logged a model, so its metric is not known", _NAME_IT)


def _rises(metric: str, models: Sequence[Any]) -> bool:
    """Whether more of a metric is better: known by its name, or said by the runs."""
    said = {model.tags.get(HIGHER_IS_BETTER) for model in models} - {None}
    if len(said) == 1 and {model.tags.get(METRIC) for model in models} == {metric}:
        return said == {"true"}
    try:
        return higher_is_better(metric)
    except UserError:
        return True


def near_names(name: str, names: Sequence[str], words: str) -> str:
    """A cure for a name that is not known: those that are near, else those that there are."""
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"{words} {', '.join(sorted(names)[:8])}" if names else f"{words} none"
