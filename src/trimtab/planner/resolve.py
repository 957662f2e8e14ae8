"""Turn a recipe into a resolved run: its data, its model and its plan, each decided and loaded once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.build.data import build_data, build_tokens
from trimtab.build.engine import compare_processes
from trimtab.build.model import build_freezing, build_model, place_model
from trimtab.build.parts import ResolvedRun
from trimtab.build.paths import with_absolute_paths
from trimtab.build.plan import build_plan
from trimtab.build.teacher import build_teacher
from trimtab.build.tracked_model import find_tracked_model, with_model_here
from trimtab.engine.engine import Engine
from trimtab.planner.decide import decide
from trimtab.planner.trial_step import TrialSteps
from trimtab.recipe.schema import Recipe
from trimtab.runs.plan import stored_plan


def resolve_run(
    asked: Recipe, engine: Engine, resumed: Path | None, loss: Callable[..., Any] | None = None
) -> ResolvedRun:
    """Read the data of a recipe, load its model, and resolve everything at `auto`.

    Args:
        asked: The recipe.
        engine: The engine of the run.
        resumed: The folder of the run to resume, whose model and plan are kept; None for a new run.
        loss: A loss function passed by the user.

    Raises:
        DoesNotFit: Nothing fits into the memory of a GPU, or nothing that was measured fits.
        UserError: The recipe, its data or its model cannot be used.
    """
    written = with_absolute_paths(asked)  # for code that runs in another directory
    tracked = engine.decide_on_main_process(lambda: find_tracked_model(asked, resumed))
    with engine.local_main_process_first():  # other ranks read downloads and tokens from the cache
        recipe = with_model_here(asked, tracked)
        data = build_data(recipe)
        loaded = build_model(recipe, data, engine)
        tokens = build_tokens(recipe, data, loaded)
        teacher = build_teacher(recipe, data, tokens, loaded, engine)
    compare_processes(recipe, data, tokens, engine)
    freezing = build_freezing(recipe, loaded)
    before = None if resumed is None else stored_plan(resumed)
    decision = decide(
        recipe,
        data,
        tokens,
        loaded,
        engine,
        has_own_loss=loss is not None,
        stored=before,
        teacher=teacher,
        trials=TrialSteps(recipe, data, tokens, loaded, freezing, engine, loss, teacher),
    )
    place_model(recipe, data, loaded, decision.spec, freezing, engine)
    plan = build_plan(recipe, data, tokens, loaded, engine, decision.spec, decision.outlook)
    return ResolvedRun(written, recipe, engine, data, tokens, loaded, freezing, plan, loss, tracked, teacher)
