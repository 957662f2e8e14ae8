"""The recipe with which a run is resumed: its file, or the settings in a checkpoint if the file was damaged."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from trimtab.build.consent import check_consent, describe_sources
from trimtab.build.paths import with_moved_paths
from trimtab.build.resume_rules import find_differences
from trimtab.build.start_point import directory_of, step_number
from trimtab.checkpoint.checkpoints_folder import CheckpointsFolder
from trimtab.errors import RecipeError, UserError, as_argument
from trimtab.log import muted, say
from trimtab.recipe.load import LoadedRecipe, load_recipe, load_to_resume
from trimtab.recipe.schema import Recipe
from trimtab.runs.lost_status import RECIPE
from trimtab.runs.mirror_recovery import mirror_setting, recover
from trimtab.runs.run_folder import CHECKPOINTS, is_recipe_unchanged


def recover_recipe(
    run: Path, out: str | None, from_step: str | None, sets: Sequence[str], *, trusts: bool
) -> LoadedRecipe:
    """Return the recipe with which a run resumes; a mirror is copied back first.

    Args:
        run: The run's folder, or its mirror.
        out: Where to copy a mirror to.
        from_step: The checkpoint to resume from ("step-100"); None for the newest.
        sets: Changes such as "train.epochs=5".
        trusts: Whether the user agrees to execute the Python code that the run's files name.
    """
    setting = mirror_setting(run)
    if setting:
        found = None
        with suppress(UserError), muted():  # an error in the mirror's files is reported when they are restored
            found = load_resumed_recipe(run, from_step, sets, setting)
        if found is not None:  # refused before anything is copied
            check_consent(found, run, is_mirror=True, trusts=trusts)
    folder = recover(run, out)
    loaded = load_resumed_recipe(folder, from_step, sets, setting)
    check_consent(loaded, folder, is_mirror=bool(setting), trusts=trusts)
    if setting:
        say(f"from the mirror: {describe_sources(loaded.recipe)}")
    return loaded


def load_resumed_recipe(
    run: Path, from_step: str | None, sets: Sequence[str], overrides: Mapping[str, Any] | None = None
) -> LoadedRecipe:
    """Return the recipe with which a run resumes.

    It is the recipe.yaml of the run if that file is unchanged, otherwise the settings in the checkpoint: a truncated
    recipe may still be valid, but describes another run.

    Args:
        run: The run's folder.
        from_step: The checkpoint to resume from ("step-100"); None for the newest.
        sets: Changes such as "train.epochs=5".
        overrides: Changes by dotted key; `sets` takes precedence.
    """
    path = run / RECIPE
    saved = _saved_settings(run, None if from_step is None else step_number(from_step))
    is_as_written = is_recipe_unchanged(run)
    if is_as_written is False and saved is None:
        _report_no_settings(run)
    source: Path | dict[str, Any] = path
    name = ""
    if not is_as_written and saved is not None:
        name, settings = saved
        problem = _difference_from(path, Recipe(**settings))
        if problem:
            say(f"{path} {problem}: using the settings saved in {name}; change one with --set KEY=VALUE")
            source = settings
    loaded = load_to_resume(source, name, run, sets, overrides or {})
    return replace(loaded, recipe=with_moved_paths(loaded.recipe, directory_of(run)))


def _saved_settings(run: Path, step: int | None) -> tuple[str, dict[str, Any]] | None:
    """Return the name and the settings of a checkpoint; without a step, of the newest one that contains settings."""
    for saved in reversed(CheckpointsFolder(run / CHECKPOINTS).checkpoints()):
        if saved.is_valid and step in (None, saved.step) and isinstance(saved.facts.get("settings"), dict):
            return saved.path.name, saved.facts["settings"]
    return None


def _report_no_settings(run: Path) -> None:
    """Report a damaged recipe if no checkpoint contains settings: there is none, or it is from an older version."""
    if not CheckpointsFolder(run / CHECKPOINTS).checkpoints():
        raise RecipeError(
            f"{run / RECIPE} is missing or was changed since the run wrote it, and there is no checkpoint yet",
            f"start again with your own recipe: trimtab train RECIPE --out {as_argument(run)} --fresh",
        )
    say(f"{run / RECIPE} was changed since the run wrote it; it is used, because the checkpoints contain no settings")


def _difference_from(path: Path, saved: Recipe) -> str:
    """Describe how a recipe file differs from saved settings; empty if it does not."""
    try:
        now = load_recipe(path, {}, []).recipe
    except RecipeError as error:
        return "is missing" if not path.exists() else f"cannot be read ({str(error.problem).splitlines()[0]})"
    keys = [difference.key for difference in find_differences(saved, now)]
    return f"differs from the settings of the run in {', '.join(keys)}" if keys else ""
