"""The spine: recipe → data → model → plan → trainer → result. Read this first."""

import json
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.build import (
    Data,
    build_data,
    build_engine,
    build_freezing,
    build_model,
    build_plan,
    build_tokens,
    build_trainer,
    run_name,
)
from trimtab.data.show import DataReport, describe_data
from trimtab.inference.load import load
from trimtab.inference.predict_text import predict_text
from trimtab.log import say
from trimtab.recipe.load import LoadedRecipe, resolved_yaml
from trimtab.recipe.plan import Plan
from trimtab.recipe.schema import Recipe
from trimtab.tracking.run_folder import RunFolder, check_free, default_folder
from trimtab.train.evaluate import OwnMetric
from trimtab.train.loop import FitResult
from trimtab.train.progress import build_progress


@dataclass(frozen=True)
class Result:
    """What a run leaves: how it ended, what was planned, and where its best model is."""

    fit: FitResult
    plan: Plan
    folder: Path
    best: Path | None


def fit(
    recipe: Recipe | LoadedRecipe,
    *,
    callbacks: Sequence[object] = (),
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    progress: str = "auto",
    device: str | None = None,
) -> Result:
    """Train what a recipe says, and keep the best model.

    Args:
        recipe: A `Recipe`, or one loaded from a file with the origin of its values.
        callbacks: Objects with any of on_step, on_eval, on_save, on_end.
        loss: An own loss: a function of (outputs, batch) that gives a mean, or a mean and its weight.
        metrics: Own metrics: functions of (logits, batch) that give one value a row. `evaluate.metric` may name one;
            more is better unless the function has an attribute `higher_is_better` that is False.
        progress: "auto", "bar", "plain", "json" or "quiet".
        device: Where to train; found by itself if left out.
    """
    origins = recipe if isinstance(recipe, LoadedRecipe) else LoadedRecipe(recipe, {})
    recipe = origins.recipe
    check_free(_place(recipe))
    data = build_data(recipe)
    loaded = build_model(recipe, data)
    tokens = build_tokens(recipe, data, loaded)
    engine = build_engine(recipe, device)
    freezing = build_freezing(recipe, loaded)
    plan = build_plan(recipe, data, tokens, loaded, engine)
    folder = RunFolder(_place(recipe))
    parts = (data, tokens, loaded, engine, plan, freezing, folder)
    try:
        show = build_progress(progress)
        trainer = build_trainer(recipe, *parts, show, callbacks=list(callbacks), loss=loss, metrics=metrics)
    except BaseException:
        folder.remove()  # nothing has run: a mistake in the recipe costs no name and no --out
        raise
    try:
        for line in plan.describe():
            say(line)
        folder.write_text("recipe.yaml", resolved_yaml(origins))
        folder.write_text("plan.json", json.dumps(plan.as_dict(), indent=1))
        folder.start(recipe.model_dump(mode="json"), plan.num_steps)
        result = trainer.fit()
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        folder.finish(state, error=f"{type(error).__name__}: {error}")
        show.finish(f"{state}: {folder.path}", failed=True)
        if recipe.limits.fast_dev_run:
            folder.remove()
        raise
    folder.finish("stopped" if result.stop_reason == "time limit" else "finished", step=result.step)
    show.finish(f"{result.stop_reason} after {result.step} steps: {folder.path}")
    if recipe.limits.fast_dev_run:
        return _tried_out(Result(result, plan, folder.path, None), data, folder)
    return Result(result, plan, folder.path, folder.best if folder.best.exists() else None)


def _tried_out(result: Result, data: Data, folder: RunFolder) -> Result:
    """The end of a fast_dev_run: the saved model is loaded and used once, then nothing is left behind."""
    try:
        done = ["train", *(["evaluate"] if result.fit.metrics else []), "save", "load"]
        model = load(folder.best)
        if data.task.name != "masked-lm":  # which names hidden tokens, and says nothing of a text
            first = data.task.columns.get("text") or data.task.columns.get("prompt")
            name = first[0] if isinstance(first, list) else first
            text = str(data.train.columns[name][0]) if name in data.train.columns else "a text"
            say(f"saved, loaded, and asked once: {predict_text(model, text, max_new_tokens=8)!r}")
            done.append("predict")
        say(f"fast_dev_run: {', '.join(done)} work; nothing was kept")
    finally:
        folder.remove()
    return result


def look_at_data(recipe: Recipe | LoadedRecipe, num_examples: int = 3) -> DataReport:
    """The data of a recipe as the model would see it."""
    recipe = recipe.recipe if isinstance(recipe, LoadedRecipe) else recipe
    data = build_data(recipe)
    loaded = build_model(recipe, data)
    tokens = build_tokens(recipe, data, loaded)
    return describe_data(data.task, data.train, data.eval, tokens.train, tokens.eval, loaded.tokenizer, num_examples)


def _place(recipe: Recipe) -> Path:
    if recipe.limits.fast_dev_run:
        return Path(tempfile.gettempdir()) / f"trimtab-fast-dev-run-{uuid.uuid4().hex}"
    if recipe.out is not None:
        return Path(recipe.out)
    return default_folder(Path("runs"), run_name(recipe), recipe.name)
