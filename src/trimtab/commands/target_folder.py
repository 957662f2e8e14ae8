"""The folders that a command may write a model to."""

from pathlib import Path

from trimtab.checkpoint.export import FACTS
from trimtab.checkpoint.folder import refuse_unwritable
from trimtab.errors import RecipeError
from trimtab.runs.run_folder import find_run


def check_target(source: str, target: Path) -> None:
    """Refuse a folder that cannot be created, or whose contents a new model would replace.

    What such a command wrote may be replaced.

    Args:
        source: The resolved source of the model that is read.
        target: The folder to write.
    """
    if target.resolve() == Path(source).resolve():
        raise RecipeError(f"{target} is the model itself, which the new one would replace", "pass a new folder")
    if target.resolve() in Path(source).resolve().parents and (target / FACTS).is_file():
        raise RecipeError(f"{target} contains the model {source}, which would be removed", "pass a new folder")
    if target.exists() and (find_run(target) is not None or find_run(target.parent) is not None):
        raise RecipeError(f"{target} belongs to a run, which the new model would damage", "pass a new folder")
    refuse_unwritable(target)
    is_ours = (target / FACTS).is_file()
    if target.exists() and not is_ours and (not target.is_dir() or any(target.iterdir())):
        raise RecipeError(f"{target} contains other files, which the model would replace", "pass a new folder")
