"""Where a run goes, whether it begins there or goes on, and from which state."""

import json
import shutil
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.build import run_name, with_absolute_paths, with_moved_paths
from trimtab.checkpoint.checkpoints_folder import Shelf
from trimtab.checkpoint.disk_errors import cure_of
from trimtab.checkpoint.export import read_facts, why_damaged
from trimtab.checkpoint.mirror import is_mirror, restore
from trimtab.checkpoint.store import read_manifest, why_invalid
from trimtab.distributed.environment import started_again
from trimtab.engine.engine import Engine
from trimtab.errors import CheckpointError, RecipeError
from trimtab.log import say
from trimtab.optim.schedules import reshape, shapes_of
from trimtab.recipe.load import LoadedRecipe, load_recipe, load_to_resume
from trimtab.recipe.resume_rules import Difference, all_differences, differences
from trimtab.recipe.schema import Recipe
from trimtab.runs.lock import RunLock
from trimtab.runs.lost_status import RECIPE, RESTORING
from trimtab.runs.run_folder import (
    CHECKPOINTS,
    SILENT_S,
    check_free,
    clear_folder,
    default_folder,
    find_run,
    is_recipe_as_written,
    read_status,
    unfinished_run,
)
from trimtab.training.checkpoints import different_numerics
from trimtab.training.loop import Trainer


@dataclass(frozen=True)
class Beginning:
    """Where a run goes, and what it goes on from."""

    path: Path
    checkpoint: Path | None = None  # the state to go on from
    goes_on: bool = False  # there is a run in the folder already
    is_longer: bool = False  # the recipe asks for another length, or other patience
    is_branch: bool = False  # from a state that was named, and with another recipe: another way from there on


def find_beginning(recipe: Recipe, resume: bool | str, fresh: bool) -> Beginning:
    """Decide where a run goes; nothing is changed yet, but that `fresh` removes what is there.

    Args:
        recipe: What to train.
        resume: Go on with a run that is there, from its newest state or from a named one ("step-100").
        fresh: Replace a run that is there.

    Raises:
        RecipeError: If the folder is in use, or the recipe is not that of the run which should go on.
    """
    if resume and fresh:
        raise RecipeError("--resume and --fresh were both given", "leave one of them out")
    again = started_again()
    path = _place(recipe, bool(resume), again)
    run = find_run(path)
    if run is not None and again is not None and run.get("job") == again:
        fresh, resume = False, True  # they were for the first attempt, which has begun
    if run is not None and (fresh or resume or again):
        # refuses here, before anything is loaded, if another process is at work there
        with RunLock(path, take_over=again is not None, patience_s=SILENT_S):
            if fresh:
                clear_folder(path)
                run = None
    goes_on = run is not None and (bool(resume) or (again is not None and run.get("job") == again))
    if not goes_on:
        check_free(path)
        return Beginning(path)
    step = _step_number(resume) if isinstance(resume, str) else None
    shelf = Shelf(path / CHECKPOINTS)
    stored = shelf.open(step)
    found = _compare(path, None if stored is None else stored.facts.get("settings"), recipe)
    is_longer = any(difference.is_about_length for difference in found)
    is_branch = step is not None and any(not difference.is_harmless for difference in found)
    if stored is None:
        damaged = shelf.checkpoints()
        if damaged:  # perhaps they can be mended, or the disk has a bad day: a run is not begun anew for that
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoints in {shelf.folder} is valid",
                "mend or restore one of them; --fresh begins anew",
            )
        say(f"{path} holds no saved state yet: the run starts from the beginning")
        return Beginning(path, goes_on=True)
    return Beginning(path, stored.folder, goes_on=True, is_longer=is_longer, is_branch=is_branch)


def _place(recipe: Recipe, resume: bool, again: str | None) -> Path:
    if recipe.limits.fast_dev_run:
        return Path(tempfile.gettempdir()) / f"trimtab-fast-dev-run-{uuid.uuid4().hex}"
    if recipe.out is not None:
        return Path(recipe.out)
    root, experiment = Path("runs"), run_name(recipe)
    unfinished = unfinished_run(root / experiment, again) if (resume or again) and recipe.name is None else None
    return unfinished or default_folder(root, experiment, recipe.name)


def _step_number(name: str) -> int:
    digits = name.removeprefix("step-")
    if not digits.isdigit():
        raise RecipeError(f"--from {name} names no checkpoint", "--from step-100; trimtab checkpoints RUN lists them")
    return int(digits)


def _compare(path: Path, settings: dict[str, Any] | None, recipe: Recipe) -> list[Difference]:
    """Say which keys are not as they were; refuse those that would make it another run.

    Args:
        path: The run's folder.
        settings: Those of the state that the run resumes from; None if it holds none.
        recipe: The recipe now.
    """
    try:
        before = load_recipe(path / RECIPE, {}, []).recipe if settings is None else Recipe(**settings)
    except RecipeError:
        return []  # killed before it was written, or edited: the state itself is compared when it is loaded
    before = with_moved_paths(before, _directory_of(path))
    found = differences(with_absolute_paths(before), with_absolute_paths(recipe))
    for difference in found:
        kind = "changes nothing that is computed" if difference.is_harmless else "counts from here on"
        say(f"{difference} ({kind})")
    return found


def load_settings(
    run: Path, from_step: str | None, sets: Sequence[str], overrides: Mapping[str, Any] | None = None
) -> LoadedRecipe:
    """The recipe with which a run resumes.

    It is the file in the run's folder if that is as the run has written it, and the settings in the saved state if it
    is not: a recipe that was cut off is a recipe too, but of another run.

    Args:
        run: The run's folder.
        from_step: The state to resume from ("step-100"); None for the newest.
        sets: Changes, as "train.epochs=5".
        overrides: Changes by dotted key, over which those of `sets` count.
    """
    path = run / RECIPE
    saved = _settings_of_state(run, None if from_step is None else _step_number(from_step))
    is_as_written = is_recipe_as_written(run)
    if is_as_written is False and saved is None:
        _say_no_settings(run)
    source: Path | dict[str, Any] = path
    name = ""
    if not is_as_written and saved is not None:
        name, settings = saved
        problem = _differs_from(path, Recipe(**settings))
        if problem:
            say(f"{path} {problem}: the settings saved in {name} are used; --set KEY=VALUE changes one")
            source = settings
    loaded = load_to_resume(source, name, run, sets, overrides or {})
    return replace(loaded, recipe=with_moved_paths(loaded.recipe, _directory_of(run)))


def _directory_of(run: Path) -> str | None:
    """The directory in which a run was started, where its folder knows it."""
    directory = (find_run(run) or {}).get("directory")
    return directory if isinstance(directory, str) else None


def _settings_of_state(run: Path, step: int | None) -> tuple[str, dict[str, Any]] | None:
    """The settings in a state and the state's name; without a step, of the newest one that holds any."""
    for saved in reversed(Shelf(run / CHECKPOINTS).checkpoints()):
        if saved.is_valid and step in (None, saved.step) and isinstance(saved.facts.get("settings"), dict):
            return saved.path.name, saved.facts["settings"]
    return None


def _say_no_settings(run: Path) -> None:
    """Of a damaged recipe, where the states are of a version that did not keep settings, or where there are none."""
    if not Shelf(run / CHECKPOINTS).checkpoints():
        raise RecipeError(
            f"{run / RECIPE} is missing, or is not as the run has written it, and no state was saved yet",
            f"start again with your own recipe: trimtab train RECIPE --out {run} --fresh",
        )
    say(f"{run / RECIPE} was changed since the run wrote it; it is used, because the saved states hold no settings")


def _differs_from(path: Path, saved: Recipe) -> str:
    """In which keys a recipe file differs from saved settings, in words; empty if in none."""
    try:
        now = load_recipe(path, {}, []).recipe
    except RecipeError as error:
        return "is missing" if not path.exists() else f"cannot be read ({str(error.problem).splitlines()[0]})"
    keys = [difference.key for difference in all_differences(saved, now)]
    return f"differs from the settings of the run in {', '.join(keys)}" if keys else ""


def go_on(trainer: Trainer, engine: Engine, beginning: Beginning, lr: float) -> int | None:
    """Bring a trainer to where a run was.

    Returns:
        How far the run's journal holds, or None where the run starts from the beginning.
    """
    if beginning.checkpoint is None:
        return None
    shapes = shapes_of(trainer.schedule)
    engine.load_state(beginning.checkpoint)
    _see_that_best_is_whole(trainer, engine, beginning.path, beginning.checkpoint)
    trainer.find_place()
    step = trainer.state.step
    say(f"goes on from {beginning.checkpoint.name} ({beginning.checkpoint.parent.parent})")
    words = reshape(trainer.schedule, shapes, lr)
    if words is not None:
        say(words)
    if engine.is_main_process:
        Shelf(beginning.checkpoint.parent).drop_after(step)
        for difference in different_numerics(read_manifest(beginning.checkpoint).facts, engine):
            say(f"{difference}: the same up to rounding, not to the last bit")
    if beginning.is_longer:
        trainer.forget_patience()
    else:
        trainer.end_as_saved()
        if trainer.state.should_stop:
            say(f"it has ended ({trainer.state.stop_reason}); more: --set train.epochs=… or early_stopping.patience=…")
    if beginning.is_branch and engine.first_decides(lambda: _set_aside_newer_best(beginning.path, step)):
        trainer.forget_best()
    if step >= trainer.state.num_steps:
        say("all its steps are done; more: --set train.epochs=…")
    return trainer.journal_position


def _see_that_best_is_whole(trainer: Trainer, engine: Engine, run: Path, checkpoint: Path) -> None:
    """Write a best model that was damaged or lost again from the state of its step; without that, seek it anew."""
    step = trainer.kept_step
    problem = "" if step is None else engine.first_decides(lambda: _why_best_is_damaged(run, checkpoint))
    if step is None or not problem:
        return
    source = Shelf(run / CHECKPOINTS).place(step)
    if engine.first_decides(lambda: not why_invalid(source)):
        engine.load_state(source)
        trainer.write_best_again()
        engine.load_state(checkpoint)
        say(f"the best model was damaged ({problem}): it was written again from {source.name}")
        return
    engine.first_decides(lambda: _set_aside_best(run, f"damaged-step-{step}"))
    trainer.forget_best()
    say(
        f"the best model, of step {step}, is lost: {problem}, and no saved state has its weights. From here on the "
        "best model is the best of the evaluations that follow"
    )


def _why_best_is_damaged(run: Path, checkpoint: Path) -> str:
    best = run / "best"
    try:
        of_step = read_facts(best).get("step")
    except CheckpointError as error:
        return error.problem
    of_state = read_manifest(checkpoint).facts.get("run", {})
    noted = [status.get("best_files") or {} for status in (find_run(run) or {}, of_state)]
    return why_damaged(best, next((one.get("files") for one in noted if one.get("step") == of_step), None))


def _set_aside_best(run: Path, name: str) -> Path:
    """Keep the folder of the best model, or what is left of it, under another name."""
    aside = run / f"best-{name}"
    if (run / "best").exists():
        shutil.rmtree(aside, ignore_errors=True)
        (run / "best").rename(aside)
    return aside


def _set_aside_newer_best(run: Path, step: int) -> bool:
    """A best model of steps that are left behind would never be replaced by a worse one of the new way."""
    try:
        newer: int = json.loads((run / "best" / "trimtab.json").read_text())["step"]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if newer <= step:
        return False
    aside = _set_aside_best(run, f"step-{newer}")
    say(f"the best model was of step {newer}, which is left behind: it is kept in {aside}, and the best is sought anew")
    return True


def recover(run: Path, out: str | None) -> Path:
    """The folder of a run that should go on; a mirror is copied back first.

    Where a mirror is copied to follows from what the user says alone. The mirror's own files also name a folder, but
    whoever can write to the drive can write that name.

    Args:
        run: A run's folder, or the mirror of one.
        out: Where a mirror is copied to; by default runs/EXPERIMENT/NAME, by the names of the mirror's own folders.
    """
    if not run.is_dir():
        raise RecipeError(f"{run} is no folder", "pass a run's folder; trimtab runs lists them")
    if not is_mirror(run):
        if find_run(run) is None:
            below = [str(path.parent) for path in run.glob("*/*/run.json") if is_mirror(path.parent)]
            cure = f"it holds the mirrors {', '.join(sorted(below))}: pass one" if below else "trimtab runs lists runs"
            raise RecipeError(f"{run} is no run", cure)
        if out is not None:
            raise RecipeError("--out belongs to a mirror, and this is the run itself", "leave it out")
        return run
    run, place = _without_dots(run), run.resolve()
    target = Path(out) if out is not None else Path("runs", place.parent.name, place.name)
    if target.resolve() == place:
        raise RecipeError(f"{run} is a mirror, where no run can go on", "choose a folder for the run with --out")
    before = (read_status(run) or {}).get("path")
    mark = target / RESTORING  # what a kill has left of a copy is no reason to refuse the next
    is_used = target.exists() and any(target.iterdir())
    if is_used and (read_status(target) is not None or not mark.exists()):
        raise RecipeError(f"{target} is not empty", f"trimtab resume {target} goes on there; or choose another --out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        mark.touch()
        restore(run, target)
        mark.unlink()
    except OSError as error:
        cure = cure_of(error, "choose another --out")
        raise CheckpointError(f"{run} could not be copied to {target}: {error.strerror or error}", cure) from error
    has_moved = out is None and isinstance(before, str) and Path(before).absolute() != target.absolute()
    say(f"{run} was copied to {target}" + (f"; it was in {before}, which --out can name" if has_moved else ""))
    return target


def same_mirror(run: Path) -> dict[str, str]:
    """The setting with which a run that came back from its mirror keeps this very mirror, wherever it is mounted now.

    Args:
        run: What was resumed: the mirror; empty for a run's own folder.
    """
    if not is_mirror(run):
        return {}
    place = _without_dots(run)
    return {"checkpoint.mirror": str((place if len(place.parts) > 2 else place.absolute()).parent.parent)}


def _without_dots(path: Path) -> Path:
    """A path whose parents are those of its text."""
    return path.resolve() if ".." in path.parts else path
