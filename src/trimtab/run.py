"""The spine: recipe → start point → resolved run → trainer → result. Read this first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.build.engine import build_engine
from trimtab.build.given_objects import with_given_objects
from trimtab.build.resumed_recipe import load_resumed_recipe
from trimtab.build.run_record import failure_recorded, open_folder, record_end, record_start, released_on_failure
from trimtab.build.start_point import find_start_point
from trimtab.build.training import build_trainer
from trimtab.data.metrics import check_own_metrics
from trimtab.engine.engine import Engine
from trimtab.planner.out_of_memory import OutOfMemoryPicture
from trimtab.planner.resolve import resolve_run
from trimtab.recipe.load import LoadedRecipe, as_loaded
from trimtab.recipe.schema import Recipe
from trimtab.runs.mirror_recovery import mirror_setting, recover
from trimtab.runs.plan import Plan
from trimtab.training.callbacks import check_callbacks
from trimtab.training.evaluate import OwnMetric
from trimtab.training.progress import build_progress
from trimtab.training.resume import resume_trainer
from trimtab.training.run_state import FitResult
from trimtab.training.work_progress import work_shown_as


@dataclass(frozen=True)
class Result:
    """The result of a run: how it ended, its plan, its folder, and the folder of its best model."""

    fit: FitResult
    plan: Plan
    folder: Path
    best: Path | None
    is_main_process: bool = True


def fit(
    recipe: Recipe | LoadedRecipe,
    *,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[object] = (),
    loss: Callable[..., Any] | None = None,
    metrics: Mapping[str, OwnMetric] | None = None,
    progress: str = "auto",
    device: str | None = None,
    resume: bool | str = False,
    fresh: bool = False,
) -> Result:
    """Train as a recipe says, and keep the best model.

    Args:
        recipe: A `Recipe`, or one loaded from a file with the origin of its values.
        model: A model object that is trained instead of the recipe's model. A copy in the folder of the runs is what
            trains; resuming the run needs that copy. Models that transformers cannot load again are refused.
        tokenizer: A tokenizer object, in the same way.
        callbacks: Objects with any of on_step, on_eval, on_save, on_end.
        loss: A custom loss: a function of (outputs, batch) that returns a mean, or a mean and its weight.
        metrics: Custom metrics: functions of (logits, batch) that return one value per row. `evaluate.metric` may
            name one; higher is better unless the function has an attribute `higher_is_better` that is False.
        progress: "auto", "bar", "plain", "json" or "quiet".
        device: Where to train; found if left out.
        resume: Resume the run in the folder, if there is one; "step-100" from that checkpoint.
        fresh: Replace the run in the folder.

    Raises:
        Stopped: After a signal; a checkpoint was saved, and the run can be resumed.
        RecipeError: A callback would never be called, or a metric of yours has the name of one of trimtab's.
    """
    loaded = as_loaded(recipe)
    check_callbacks(callbacks)
    check_own_metrics(metrics or {})
    engine = build_engine(loaded.recipe, device)
    with engine.local_main_process_first():
        loaded = replace(loaded, recipe=with_given_objects(loaded.recipe, model, tokenizer))
    start = engine.decide_on_main_process(lambda: find_start_point(loaded.recipe, resume, fresh))
    run = resolve_run(loaded.recipe, engine, start.path if start.is_resumed else None, loss)
    folder = open_folder(start, engine)
    mode = progress if engine.is_main_process else "quiet"
    with released_on_failure(folder), work_shown_as(mode):
        show = build_progress(mode)
        picture = OutOfMemoryPicture(run, folder.path)
        trainer = build_trainer(run, folder, show, callbacks=list(callbacks), metrics=metrics, picture=picture)
        journal_position = resume_trainer(trainer, engine, start)
    with failure_recorded(run, folder, show):
        record_start(run, loaded.origins, trainer, folder, journal_position)
        result = trainer.fit()
        engine.wait_for_everyone()
    record_end(run, result, folder, show)
    best = folder.best if folder.best.exists() else None
    return Result(result, run.plan, folder.path, best, engine.is_main_process)


def resume(
    run: str | Path, *, from_step: str | None = None, sets: Sequence[str] = (), out: str | None = None, **options: Any
) -> Result:
    """Resume a run that was killed or stopped, or train a finished one longer.

    Args:
        run: Its folder, or its mirror.
        from_step: The checkpoint to resume from ("step-100"); by default the newest.
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
