"""Copy a run back from its mirror."""

from pathlib import Path

from trimtab.checkpoint.disk_errors import cure_for_os_error
from trimtab.checkpoint.mirror import is_mirror, restore
from trimtab.errors import CheckpointError, RecipeError, as_argument
from trimtab.log import say
from trimtab.runs.consent import forget_consent
from trimtab.runs.lost_status import RESTORING
from trimtab.runs.run_folder import find_run, read_status


def recover(run: Path, out: str | None) -> Path:
    """Return the folder of a run to resume; a mirror is copied back first.

    Only the user decides where a mirror is copied to. Its own files name a folder too, but anyone who can write to
    the drive can change that name.

    Args:
        run: A run's folder, or its mirror.
        out: Where to copy a mirror to; by default runs/EXPERIMENT/NAME, after the names of the mirror's folders.
    """
    if not run.is_dir():
        raise RecipeError(f"{run} is not a folder", "pass a run's folder; trimtab runs lists them")
    if not is_mirror(run):
        _check_is_run(run, out)
        return run
    run, place = _without_dots(run), run.resolve()
    target = Path(out) if out is not None else Path("runs", place.parent.name, place.name)
    if target.resolve() == place:
        raise RecipeError(f"{run} is a mirror and cannot be resumed in place", "choose a folder for the run with --out")
    before = (read_status(run) or {}).get("path")
    mark = target / RESTORING  # left by a copy that was killed, and not a reason to refuse the next one
    is_used = target.exists() and any(target.iterdir())
    if is_used and (read_status(target) is not None or not mark.exists()):
        raise RecipeError(f"{target} is not empty", f"trimtab resume {as_argument(target)}, or choose another --out")
    try:
        target.mkdir(parents=True, exist_ok=True)
        mark.touch()
        forget_consent(target)  # of a run that was here before
        restore(run, target)
        mark.unlink()
    except OSError as error:
        cure = cure_for_os_error(error, "choose another --out")
        raise CheckpointError(f"{run} could not be copied to {target}: {error.strerror or error}", cure) from error
    has_moved = out is None and isinstance(before, str) and Path(before).absolute() != target.absolute()
    moved = f"; its original folder was {before} (--out {as_argument(str(before))})" if has_moved else ""
    say(f"{run} was copied to {target}{moved}")
    return target


def _check_is_run(run: Path, out: str | None) -> None:
    if find_run(run) is None:
        below = [str(path.parent) for path in run.glob("*/*/run.json") if is_mirror(path.parent)]
        cure = f"pass one of the mirrors in it: {', '.join(sorted(below))}" if below else "trimtab runs lists runs"
        raise RecipeError(f"{run} is not a run", cure)
    if out is not None:
        raise RecipeError(f"--out is only for mirrors, but {run} is a run", "remove --out")


def mirror_setting(run: Path) -> dict[str, str]:
    """Return the setting with which a recovered run keeps its mirror, wherever that is mounted now.

    Args:
        run: The folder that was resumed; a run's own folder has no such setting, only a mirror.
    """
    if not is_mirror(run):
        return {}
    place = _without_dots(run)
    return {"checkpoint.mirror": str((place if len(place.parts) > 2 else place.absolute()).parent.parent)}


def _without_dots(path: Path) -> Path:
    """Resolve "." and ".." in a path, so that its text shows its parents."""
    return path.resolve() if ".." in path.parts else path
