"""The spine: recipe → start point → resolved run → trainer → result. Read this first."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.build.engine import build_engine, with_stored_precision
from trimtab.build.given_objects import with_given_objects
from trimtab.build.parts import EndedRun
from trimtab.build.resumed_recipe import recover_recipe
from trimtab.build.run_record import failure_recorded, open_folder, record_end, record_start, released_on_failure
from trimtab.build.start_point import find_start_point
from trimtab.build.training import build_trainer
from trimtab.data.metrics import check_own_metrics
from trimtab.engine.engine import Engine
from trimtab.log import quiet_on_request
from trimtab.planner.out_of_memory import OutOfMemoryPicture
from trimtab.planner.resolve import resolve_run
from trimtab.recipe.load import LoadedRecipe, as_loaded
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import Plan
from trimtab.training.callbacks import check_callbacks
from trimtab.training.evaluate import OwnMetric
from trimtab.training.progress import build_progress
from trimtab.training.resume import resume_trainer
from trimtab.training.run_state import FitResult
from trimtab.training.work_progress import work_shown_as


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        fit: How training ended: last step, final metrics, best metric, stop reason, peak memory.
        plan: How the steps were computed, with the predicted memory and time.
        folder: The run folder.
        best: The folder of the best model, in Hugging Face format; None if no model was saved.
        is_main_process: Whether this process has rank 0.
    """

    fit: FitResult
    plan: Plan
    folder: Path
    best: Path | None
    is_main_process: bool = True

    def __repr__(self) -> str:
        metrics = "".join(f", {name}={value:.4g}" for name, value in self.fit.metrics.items())
        best = None if self.best is None else str(self.best)
        return f"Result(step={self.fit.step}{metrics}, folder={str(self.folder)!r}, best={best!r})"


@quiet_on_request
def fit(
    recipe: Recipe | LoadedRecipe | str | Path,
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
    """Train a model as a recipe describes, and save the best one.

    Args:
        recipe: A `Recipe`, or the path of a recipe file.
        model: A model object to train instead of the recipe's model. A copy is saved next to the runs, trained, and
            needed to resume the run. Models that transformers cannot load again raise an error.
        tokenizer: A tokenizer object to use instead of the recipe's; saved in the same way.
        callbacks: Objects with one or more of the methods on_step, on_eval, on_save and on_end.
        loss: A custom loss: a function of (outputs, batch) that returns a mean, or a mean and its weight.
        metrics: Custom metrics by name: functions of (logits, batch) that return one value per row. `evaluate.metric`
            may name one. Higher is better, unless the function has the attribute `higher_is_better = False`.
        progress: How to show progress: "auto", "bar", "plain", "json" or "quiet".
        device: The device to train on, such as "cuda:1"; by default an accelerator if there is one, else the CPU.
        resume: Whether to resume the run if its folder already contains one; "step-100" resumes from that checkpoint.
        fresh: Whether to replace the run if its folder already contains one.

    Returns:
        The result: metrics, plan, run folder and the folder of the best model.

    Raises:
        Stopped: After a signal or at the time limit. A checkpoint was saved, and the run can be resumed.
        RecipeError: A setting is invalid, a callback has none of the known methods, or a custom metric has the name of
            a built-in one.
        DoesNotFit: No plan fits into the memory budget.

    Example:
        recipe = Recipe(model="bert-base-uncased", data={"train": "reviews.csv"}, train={"epochs": 1})
        result = fit(recipe)
        model = load(result.best).model
    """
    loaded = as_loaded(recipe)
    check_callbacks(callbacks)
    check_own_metrics(metrics or {})
    engine = build_engine(loaded.recipe, device)
    with engine.local_main_process_first():
        loaded = replace(loaded, recipe=with_given_objects(loaded.recipe, model, tokenizer))
    start = engine.decide_on_main_process(lambda: find_start_point(loaded.recipe, resume, fresh))
    engine = with_stored_precision(engine, loaded.recipe, device, start.precision)
    run = resolve_run(loaded.recipe, engine, start.path if start.is_resumed else None, loss)
    folder = open_folder(start, engine)
    mode = progress if engine.is_main_process else "quiet"
    with released_on_failure(folder), work_shown_as(mode):
        show = build_progress(mode)
        picture = OutOfMemoryPicture(run, folder.path)
        trainer = build_trainer(run, folder, show, callbacks=list(callbacks), metrics=metrics, picture=picture)
        journal_mark = resume_trainer(trainer, engine, start)
    with failure_recorded(run, folder, show):
        record_start(run, loaded.origins, trainer, folder, journal_mark)
        result = trainer.fit()
        engine.wait_for_everyone()
    ended = EndedRun.of(run)
    del run, trainer, picture  # they hold the model and the optimizer, whose memory samples for the report need
    record_end(ended, result, folder, show)
    best = folder.best if folder.best.exists() else None
    return Result(result, ended.plan, folder.path, best, engine.is_main_process)


@quiet_on_request
def resume(
    run: str | Path,
    *,
    from_step: str | None = None,
    sets: Sequence[str] = (),
    out: str | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Result:
    """Resume a run that was killed or stopped, or train a finished run longer.

    Args:
        run: The run folder, or its mirror.
        from_step: The checkpoint to resume from, such as "step-100"; by default the newest.
        sets: Changes to the recipe, such as "train.epochs=5".
        out: Folder to copy a mirror to; by default runs/EXPERIMENT/NAME, with the names in the mirror's path.
        trust_remote_code: Whether you agree to execute Python code of the model that the run's files name. A run that
            was started in its folder by you needs no second word.
        options: Other arguments of `fit`, such as callbacks or progress.

    Returns:
        The result of the run, as from `fit`.

    Example:
        resume("runs/reviews/first", sets=["train.epochs=5"])
    """
    engine = Engine(device=options.get("device"))
    loaded = engine.decide_on_main_process(
        lambda: recover_recipe(Path(run), out, from_step, sets, trusts=trust_remote_code)
    )
    return fit(loaded, resume=from_step or True, **options)
