"""Checks of `trimtab check` beyond the schema: missing files, models, tokenizers and metrics.

It reads configs, tokenizers, rows of local files and descriptions of datasets on the Hub, but no weights.
"""

from collections.abc import Callable, Iterator
from typing import Any

from trimtab.build.data import build_data
from trimtab.build.tracked_model import find_tracked_model
from trimtab.data.metrics import metrics_of_task, near_metrics
from trimtab.data.sources import check_source, is_here
from trimtab.errors import UserError
from trimtab.hardware.inventory import describe_slow_precision, find_device
from trimtab.log import say
from trimtab.model.load import check_config, load_config, load_tokenizer
from trimtab.recipe.mistakes import Mistake, shown
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.tracking.mlflow.registry import is_tracked_model


def missing_parts(recipe: Recipe) -> Iterator[Mistake]:
    """Yield a mistake for everything that a recipe names and that does not exist; if all exists, for unusable rows."""
    if note := describe_slow_precision(recipe.train.precision, find_device()):
        say(note)
    found = list(_missing_names(recipe))
    yield from found or _in_rows(recipe)


def _missing_names(recipe: Recipe) -> Iterator[Mistake]:
    for key in ("train", "eval"):
        source = getattr(recipe.data, key)
        if source is not None:  # from text: a name or a list of files
            yield from _problem(f"data.{key}", check_source, source)
    yield from _in_model(recipe)
    if recipe.distill is not None and not is_tracked_model(recipe.distill.teacher):
        yield from _problem("distill.teacher", load_tokenizer, recipe.distill.teacher)
    yield from _in_metrics(recipe)


def _in_rows(recipe: Recipe) -> Iterator[Mistake]:
    """Read the rows as a run does, which logs what is unusual in them."""
    sources = (source for source in (recipe.data.train, recipe.data.eval) if isinstance(source, str))
    elsewhere = next((source for source in sources if not is_here(source)), None)
    if elsewhere is None:
        yield from _problem("data", build_data, recipe)
    else:
        say(f"rows of {elsewhere} are not read here, but by: trimtab data show")


def _in_model(recipe: Recipe) -> Iterator[Mistake]:
    model = recipe.model if isinstance(recipe.model, ModelSettings) else ModelSettings(name=recipe.model)
    key = "model" if isinstance(recipe.model, str) else "model.name"
    trust = {"trust_remote_code": model.trust_remote_code}
    if model.config is not None:
        yield from _problem("model.config", check_config, model.config)
    elif model.name is not None and is_tracked_model(model.name):
        yield from _problem(key, find_tracked_model, recipe)
    elif model.name is not None:
        found = list(_problem(key, load_config, model.name, **trust))
        if not found and model.tokenizer is None:
            found = list(_problem(key, load_tokenizer, model.name, **trust))
        yield from found
    if model.tokenizer not in (None, "train"):
        yield from _problem("model.tokenizer", load_tokenizer, model.tokenizer, **trust)


def _in_metrics(recipe: Recipe) -> Iterator[Mistake]:
    stopping = recipe.early_stopping
    named = {
        "evaluate.metric": recipe.evaluate.metric,
        "checkpoint.best": recipe.checkpoint.best if isinstance(recipe.checkpoint.best, str) else None,
        "early_stopping.metric": None if stopping is None else stopping.metric,
    }
    allowed = metrics_of_task(recipe.task)
    for key, name in named.items():
        if name is not None and name not in allowed:
            near = near_metrics(name, allowed)
            hint = f"; did you mean {near[0]}?" if near else "; custom metrics need fit(…, metrics=…)"
            task = f" for task {recipe.task}" if recipe.task else ""
            text = f"found {shown(name)}; no such metric{task}; allowed: {', '.join(allowed)}{hint}"
            yield Mistake(tuple(key.split(".")), text, ("task",))


def _problem(key: str, look: Callable[..., Any], *arguments: Any, **settings: Any) -> Iterator[Mistake]:
    try:
        look(*arguments, **settings)
    except UserError as error:
        yield Mistake(tuple(key.split(".")), f"{error.problem}; {error.cure}")
