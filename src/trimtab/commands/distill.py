"""`trimtab distill`: train a student with the recipe's teacher, and measure both on the held-out rows of the run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.build.data import build_data
from trimtab.build.tracked_model import find_tracked_model, with_model_here
from trimtab.errors import RecipeError
from trimtab.inference.held_out import HeldOut, tokenized
from trimtab.inference.load import load
from trimtab.inference.model_measurement import ModelMeasurement, measure
from trimtab.log import muted
from trimtab.model.load import resolve_source
from trimtab.recipe.load import LoadedRecipe
from trimtab.recipe.schema import Recipe
from trimtab.run import Result, fit
from trimtab.tracking.mlflow.registry import local_source


@dataclass(frozen=True)
class Distilled:
    """The run of a student, and the measurements of teacher and student; empty if no rows were held out."""

    result: Result
    measurements: list[ModelMeasurement]


def distill(recipe: Recipe | LoadedRecipe, **options: Any) -> Distilled:
    """Train a student, and measure it and its teacher.

    Args:
        recipe: A recipe with a `distill` section.
        options: Arguments of `trimtab.fit`.

    Raises:
        RecipeError: The recipe has no `distill` section.
        Stopped: After a signal; the run can be resumed.
    """
    asked = recipe.recipe if isinstance(recipe, LoadedRecipe) else recipe
    if asked.distill is None:
        raise RecipeError(
            "the recipe has no distill section", "distill: {teacher: RUN, student: {layers: half}}, or `trimtab train`"
        )
    result = fit(recipe, **options)
    is_done = result.is_main_process and result.best is not None and not result.fit.interruption
    return Distilled(result, measure_both(asked, result, options.get("device")) if is_done else [])


def measure_both(recipe: Recipe, result: Result, device: str | None = None) -> list[ModelMeasurement]:
    """Measure the teacher and the student of a finished run on its held-out rows; empty if there are none."""
    assert recipe.distill is not None
    with muted():
        data = build_data(with_model_here(recipe, find_tracked_model(recipe, result.folder)))
        if data.eval is None:
            return []
        folder = resolve_source(local_source(recipe.distill.teacher), adapters=True)
        teacher, student = (load(source, device=device) for source in (recipe.distill.teacher, str(result.best)))
        held_out: HeldOut = tokenized(student, data.task, data.eval)
        comparison = held_out.compare_with(teacher)
        return [
            measure("teacher", teacher, held_out, folder=folder if Path(folder).exists() else None),
            measure("student", student, held_out, folder=result.best, comparison=comparison),
        ]
