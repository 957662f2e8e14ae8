"""Decide where a run starts: in which folder, and from which checkpoint."""

import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trimtab.build.data import run_name
from trimtab.build.paths import with_absolute_paths, with_moved_paths
from trimtab.build.resume_rules import Difference, differences
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.distributed.environment import restarted_job_id
from trimtab.errors import CheckpointError, RecipeError, as_argument
from trimtab.log import say
from trimtab.recipe.load import load_recipe
from trimtab.recipe.schema import Recipe
from trimtab.runs.lock import RunLock
from trimtab.runs.lost_status import RECIPE
from trimtab.runs.plan import stored_plan
from trimtab.runs.run_folder import (
    CHECKPOINTS,
    HEARTBEAT_TIMEOUT_S,
    check_free,
    default_folder,
    find_run,
    unfinished_run,
)
from trimtab.runs.start_point import StartPoint


def find_start_point(recipe: Recipe, resume: bool | str, fresh: bool) -> StartPoint:
    """Decide where a run starts. Nothing is changed yet: a mistake in the recipe must not cost the run in the folder.

    Args:
        recipe: The recipe.
        resume: Whether to resume an existing run, from its newest checkpoint or from a named one ("step-100").
        fresh: Whether to replace an existing run.

    Raises:
        RecipeError: The folder is in use, or the recipe is not that of the run to resume.
    """
    if resume and fresh:
        raise RecipeError("--resume and --fresh were both given", "pass only one of them")
    job = restarted_job_id()
    path = _folder_of(recipe, bool(resume), job)
    run = find_run(path)
    if run is not None and job is not None and run.get("job") == job:
        fresh, resume = False, True  # both options were for the first attempt of this job, which has already started
    if run is not None and (fresh or resume or job):
        # refused here, before anything is loaded, if another process trains this run
        with RunLock(path, take_over=job is not None, patience_s=HEARTBEAT_TIMEOUT_S):
            if fresh:
                return StartPoint(path, replaces_run=True)
    if run is None or not resume:
        check_free(path)
        return StartPoint(path)
    return _resumed(path, run, recipe, step_number(resume) if isinstance(resume, str) else None)


def _resumed(path: Path, run: Mapping[str, Any], recipe: Recipe, step: int | None) -> StartPoint:
    shelf = CheckpointsFolder(path / CHECKPOINTS)
    stored = shelf.open(step)
    plan = stored_plan(path)
    precision = None if plan is None else plan.precision
    if stored is not None:  # older versions did not write it
        precision = stored.facts.get("precision", precision)
    found = _compare(path, None if stored is None else stored.facts.get("settings"), recipe)
    if stored is None:
        scratch = f"trimtab train {as_argument(path / RECIPE)} --out {as_argument(path)} --fresh"
        damaged = shelf.checkpoints()
        if damaged:  # they may be repairable, or the disk may recover: do not start from scratch
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {shelf.folder} is valid",
                f"repair or restore one of them; or start from scratch: {scratch}",
            )
        if run.get("saved_step"):  # starting from scratch would replace its best model
            raise CheckpointError(
                f"{path} was saved at step {run['saved_step']}, but {shelf.folder} has no checkpoint",
                f"restore it; or start a new run from the best model: model: {path}; or start from scratch: {scratch}",
            )
        say(f"{path} contains no checkpoint yet: the run starts from scratch")
        return StartPoint(path, is_resumed=True, precision=precision)
    return StartPoint(
        path,
        stored.folder,
        is_resumed=True,
        precision=precision,
        is_longer=any(difference.is_about_length for difference in found),
        is_branch=step is not None and any(not difference.is_harmless for difference in found),
    )


def _folder_of(recipe: Recipe, resume: bool, job: str | None) -> Path:
    if recipe.limits.fast_dev_run:
        return Path(tempfile.gettempdir()) / f"trimtab-fast-dev-run-{uuid.uuid4().hex}"
    if recipe.out is not None:
        return Path(recipe.out)
    root, experiment = Path("runs"), run_name(recipe)
    unfinished = unfinished_run(root / experiment, job) if (resume or job) and recipe.name is None else None
    return unfinished or default_folder(root, experiment, recipe.name)


def step_number(name: str) -> int:
    """Return the step in a checkpoint's name, such as "step-100"."""
    digits = name.removeprefix("step-")
    if not digits.isdigit():
        raise RecipeError(
            f"--from {name} is not the name of a checkpoint", "--from step-100; trimtab checkpoints RUN lists them"
        )
    return int(digits)


def _compare(path: Path, settings: dict[str, Any] | None, recipe: Recipe) -> list[Difference]:
    """Report the keys that have changed; refuse changes that would make it a different run.

    Args:
        path: The run's folder.
        settings: The settings of the checkpoint to resume from; None if there is none.
        recipe: The recipe now.
    """
    try:
        before = load_recipe(path / RECIPE, {}, []).recipe if settings is None else Recipe(**settings)
    except RecipeError:
        return []  # not written before a kill, or edited: the state itself is compared when it is loaded
    before = with_moved_paths(before, directory_of(path))
    found = differences(with_absolute_paths(before), with_absolute_paths(recipe))
    for difference in found:
        effect = "does not change results" if difference.is_harmless else "takes effect from now on"
        say(f"{difference} ({effect})")
    return found


def directory_of(run: Path) -> str | None:
    """Return the directory in which a run was started; None if unknown."""
    directory = (find_run(run) or {}).get("directory")
    return directory if isinstance(directory, str) else None
