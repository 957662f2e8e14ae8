"""Arguments and options that several commands share, and the recipe that they add up to."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.errors import RecipeError

if TYPE_CHECKING:
    from trimtab.recipe.load import LoadedRecipe

RecipeFile = Annotated[
    Path | None, typer.Argument(help="Recipe file (YAML). Optional if flags set all required values.")
]
Model = Annotated[str | None, typer.Option(help="Hub name, folder, run, or best:EXPERIMENT.")]
DataSource = Annotated[str | None, typer.Option("--data", help="Training data: file, folder, glob or Hub name.")]
EvalSource = Annotated[str | None, typer.Option("--eval", help="Evaluation data. Default: split off from --data.")]
Task = Annotated[str | None, typer.Option(help="classify, regress, causal-lm, chat, seq2seq or masked-lm.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Set any recipe key, such as --set train.lr=3e-5.")]
Device = Annotated[str | None, typer.Option(help="Device, such as cpu or cuda:1. Default: the best one available.")]
RunFolder = Annotated[Path, typer.Argument(help="Folder of the run, or its mirror.")]
NewFolder = Annotated[Path, typer.Argument(help="New folder for the model.")]
FolderOfForm = Annotated[Path | None, typer.Argument(help="New folder. Default: ./MODEL-FORM, such as first-int8.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume the run in the folder, if there is one.")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Replace the run in the folder with a new one.")]
Uri = Annotated[str | None, typer.Option(help="Tracking server. Default: MLFLOW_TRACKING_URI, or the store in runs.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]


def folder_of_form(model: str, form: str, folder: Path | None) -> Path:
    """Return the folder for another form of a model: `folder`, or for example first-int8 for runs/reviews/first."""
    if folder is not None:
        return folder
    if model.startswith("models:/"):  # a version or an alias follows the name
        model = model.removeprefix("models:/").partition("/")[0].partition("@")[0]
    parts = model.removesuffix(".gguf").partition("@")[0].replace(":", "/").split("/")
    names = [part for part in parts if part not in ("", ".", "..", "best")]
    target = Path(f"{names[-1] if names else 'model'}-{form}")
    if target.exists():  # possibly of another model with the same last name
        raise RecipeError(f"{target} already exists", f"pass another folder, or {target} to replace it")
    return target


def load(recipe: Path | None, sets: list[str] | None, flags: dict[str, Any] | None = None) -> "LoadedRecipe":
    """Load a recipe from a file, then flags by dotted key, then `--set`; later values win."""
    from trimtab.recipe.load import load_recipe

    return load_recipe(recipe, flags or {}, sets or [])
