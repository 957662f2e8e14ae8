"""The spine: recipe → data → model → plan → trainer → result. Read this first."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.build import (
    Data,
    build_data,
    build_engine,
    build_skeleton,
    build_tokens,
    build_trainer,
    build_uploader,
)
from trimtab.build.resumed_recipe import load_resumed_recipe
from trimtab.build.start_point import find_start_point
from trimtab.checkpoint.export import read_facts
from trimtab.data.metrics import check_own_metrics
from trimtab.data.report import DataReport, describe_data
from trimtab.distributed.environment import find_place
from trimtab.engine.engine import Engine
from trimtab.errors import DoesNotFit, Stopped, TrimtabError
from trimtab.inference.load import load
from trimtab.inference.predict_text import predict_text
from trimtab.log import say
from trimtab.model.hub import is_adapter
from trimtab.planner.resolve import resolve_run
from trimtab.planner.survey import Survey, survey
from trimtab.recipe.load import LoadedRecipe, render_resolved_yaml
from trimtab.recipe.schema import Recipe
from trimtab.runs.mirror_recovery import mirror_setting, recover
from trimtab.runs.plan import Plan
from trimtab.runs.run_folder import Folder, ReadOnlyRunFolder, RunFolder
from trimtab.runs.start_point import StartPoint
from trimtab.training.callbacks import check_callbacks
from trimtab.training.evaluate import OwnMetric
from trimtab.training.progress import build_progress
from trimtab.training.resume import go_on
from trimtab.training.run_state import FitResult


@dataclass(frozen=True)
class Result:
    """The result of a run: how it ended, its plan, and where its best model is."""

    fit: FitResult
    plan: Plan
    folder: Path
    best: Path | None
    is_main_process: bool = True


def fit(
    recipe: Recipe | LoadedRecipe,
    *,
    callbacks: Sequence[object] = (),
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    progress: str = "auto",
    device: str | None = None,
    resume: bool | str = False,
    fresh: bool = False,
) -> Result:
    """Train a model from a recipe, and save the best one.

    Args:
        recipe: A `Recipe`, or one loaded from a file with the origin of its values.
        callbacks: Objects with any of on_step, on_eval, on_save, on_end.
        loss: A custom loss: a function of (outputs, batch) that returns a mean, or a mean and its weight.
        metrics: Custom metrics: functions of (logits, batch) that return one value per row. `evaluate.metric` may name
            one; higher is better unless the function has an attribute `higher_is_better` that is False.
        progress: "auto", "bar", "plain", "json" or "quiet".
        device: The device to train on; detected if left out.
        resume: Resume the run in the folder, if it exists; "step-100" resumes from that checkpoint.
        fresh: Replace the run in the folder.

    Raises:
        Stopped: A signal stopped the run; it was saved and can be resumed.
        RecipeError: A callback would never be called, or a custom metric has the name of a built-in one.
    """
    origins = recipe if isinstance(recipe, LoadedRecipe) else LoadedRecipe(recipe, {})
    recipe = origins.recipe
    check_callbacks(callbacks)
    check_own_metrics(metrics or {})
    engine = build_engine(recipe, device)
    beginning = engine.decide_on_main_process(lambda: find_start_point(recipe, resume, fresh))
    run = resolve_run(recipe, engine, beginning.path if beginning.goes_on else None, loss)
    folder = _open_folder(beginning, engine)
    try:
        show = build_progress(progress if engine.is_main_process else "quiet")
        trainer = build_trainer(run, folder, show, callbacks=list(callbacks), metrics=metrics)
        journal_position = go_on(trainer, engine, beginning, recipe.train.lr)
    except BaseException:
        folder.give_up()  # nothing was trained: keep the name and --out free for the next attempt
        raise
    try:
        for line in run.plan.describe():
            say(line)
        folder.write_recipe(render_resolved_yaml(LoadedRecipe(run.asked, origins.origins)))
        folder.write_text("plan.json", json.dumps(run.plan.as_dict(), indent=1))
        folder.start(run.recipe.model_dump(mode="json"), run.plan.num_steps, journal_position, trainer.state.step)
        if run.tracked is not None:
            folder.update(model_source=run.tracked.as_dict())
        folder.track(build_uploader(run.recipe, run.plan, run.tokens, engine, folder, trainer.higher_is_better))
        result = trainer.fit()
        engine.wait_for_everyone()
    except BaseException as error:
        state = "stopped" if isinstance(error, KeyboardInterrupt) else "failed"
        folder.finish(state, error=f"{type(error).__name__}: {error}")
        show.finish(f"{state}: {folder.path}", failed=True)
        if recipe.limits.fast_dev_run:
            folder.remove()
        raise
    folder.finish("stopped" if result.interruption else "finished", **result.summary())
    show.finish(f"{result.stop_reason} after {result.step} steps: {folder.path}")
    if recipe.limits.fast_dev_run:
        with engine.busy("testing the saved model"):
            return _tried_out(Result(result, run.plan, folder.path, None), run.data, folder)
    if result.interruption and result.interruption != "time limit":
        if recipe.checkpoint.every is None or result.save_failure:
            why = result.save_failure or "checkpoint.every is null"
            raise TrimtabError(f"{result.interruption}: stopped after step {result.step}; no state was saved: {why}")
        cure = f"continue with: trimtab resume {folder.path}"
        raise Stopped(f"{result.interruption}: saved after step {result.step}; {cure}")
    best = folder.best if folder.best.exists() else None
    return Result(result, run.plan, folder.path, best, engine.is_main_process)


def resume(
    run: str | Path,
    *,
    from_step: str | None = None,
    sets: Sequence[str] = (),
    out: str | None = None,
    **options: Any,
) -> Result:
    """Resume a run that was killed or stopped, or extend a finished one.

    Args:
        run: Its folder, or its mirror.
        from_step: The checkpoint to resume from ("step-100"); the newest if left out.
        sets: Changes to its recipe, such as "train.epochs=5".
        out: Folder to copy a mirror to; runs/EXPERIMENT/NAME, as in the path of the mirror, if left out.
        options: Arguments of `fit`.
    """
    engine = Engine(device=options.get("device"))
    mirror = mirror_setting(Path(run))
    loaded = engine.decide_on_main_process(
        lambda: load_resumed_recipe(recover(Path(run), out), from_step, sets, mirror)
    )
    return fit(loaded, resume=from_step or True, **options)


def _open_folder(beginning: StartPoint, engine: Engine) -> Folder:
    """Open the run folder: for writing on the main process, read-only on all others."""
    made: list[RunFolder] = []
    place = find_place()

    def make() -> Path:
        made.append(RunFolder(beginning.path, place.job, goes_on=beginning.goes_on, again=place.attempt > 0))
        return made[0].path

    path = engine.decide_on_main_process(make)
    return made[0] if made else ReadOnlyRunFolder(path)


def _tried_out(result: Result, data: Data, folder: Folder) -> Result:
    """Finish a fast_dev_run: load the saved model, use it once, and remove the folder."""
    if isinstance(folder, ReadOnlyRunFolder):
        return result
    try:
        done = ["train", *(["evaluate"] if result.fit.metrics else []), "save"]
        if is_adapter(folder.best) and read_facts(folder.best).get("base") is None:
            say(f"fast_dev_run: {', '.join(done)} work; nothing was kept")
            return result
        model = load(folder.best)
        done.append("load")
        if data.task.name != "masked-lm":  # it predicts masked tokens, not something about a text
            first = data.task.columns.get("text") or data.task.columns.get("prompt")
            name = first[0] if isinstance(first, list) else first
            text = str(data.train.columns[name][0]) if name in data.train.columns else "a text"
            say(f"fast_dev_run: prediction of the saved model: {predict_text(model, text, max_new_tokens=8)!r}")
            done.append("predict")
        say(f"fast_dev_run: {', '.join(done)} work; nothing was kept")
    finally:
        folder.remove()
    return result


def plan(
    recipe: Recipe | LoadedRecipe,
    *,
    memory: str | None = None,
    gpu: str | None = None,
    device: str | None = None,
    length: int | None = None,
) -> Plan:
    """Plan a run without training: the fastest plan that fits, with its predicted memory and time.

    Args:
        recipe: A `Recipe`, or one loaded from a file.
        memory: The budget, such as "8GiB", instead of the recipe's; all memory of the device if neither is given.
        gpu: A device of the catalog, such as "t4", which need not be in this machine.
        device: The device in this machine, such as "cuda:1"; detected if left out.
        length: Tokens of every row. No data is read then, and the recipe must name its task.

    Raises:
        DoesNotFit: No plan fits; the message has the smallest plan and changes that would help.
    """
    found = survey_plans(recipe, memory=memory, gpu=gpu, device=device, length=length, thorough=False)
    if found.plan is None:
        raise DoesNotFit(found.problem)
    return found.plan


def survey_plans(recipe: Recipe | LoadedRecipe, **asked: Any) -> Survey:
    """Predict all relevant plans of a recipe; arguments as in `trimtab.planner.survey.survey`."""
    return survey(recipe.recipe if isinstance(recipe, LoadedRecipe) else recipe, **asked)


def report_data(recipe: Recipe | LoadedRecipe, num_examples: int = 3) -> DataReport:
    """Report the data of a recipe as the model sees it."""
    recipe = recipe.recipe if isinstance(recipe, LoadedRecipe) else recipe
    data = build_data(recipe)
    loaded = build_skeleton(recipe, data)
    tokens = build_tokens(recipe, data, loaded)
    return describe_data(data.task, data.train, data.eval, tokens.train, tokens.eval, loaded.tokenizer, num_examples)
