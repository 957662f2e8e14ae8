"""A recipe whose model is on a tracking server: which one it means is decided once, and holds as long as the run."""

from pathlib import Path

from trimtab.log import say
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.runs.run_folder import find_run
from trimtab.tracking.mlflow.registry import TrackedModel, fetch_model, find_model, is_tracked_model
from trimtab.tracking.mlflow.uri import RUNS, default_uri, local_uri, sqlite_file, store_root

MODEL_SOURCE = "model_source"  # in run.json


def find_tracked_model(recipe: Recipe, run: Path | None = None) -> TrackedModel | None:
    """The exact model that a recipe means; None for a model that is not on a server.

    Args:
        recipe: The recipe.
        run: The folder of a run that goes on: it stays with the model that it began with.
    """
    name = _name(recipe)
    if name is None or not is_tracked_model(name):
        return None
    uri = server_of(recipe)
    before = ((find_run(run) if run is not None else None) or {}).get("model_source")
    if before is not None and before["asked"] == name:
        found = TrackedModel.from_dict(before, uri)
        say(f"{name} is {found.words}, as when the run began")
        return found
    found = find_model(name, uri)
    say(f"{name} is {found.words} ({found.exact})")
    return found


def with_model_here(recipe: Recipe, found: TrackedModel | None) -> Recipe:
    """The recipe with the folder of that model, which is fetched if need be."""
    if found is None:
        return recipe
    folder = str(fetch_model(found))
    model = recipe.model.model_copy(update={"name": folder}) if isinstance(recipe.model, ModelSettings) else folder
    return recipe.model_copy(update={"model": model})


def server_of(recipe: Recipe) -> str:
    """Where a recipe looks for models: its own server; or the store beside its run, else the one below `runs`."""
    if recipe.track.uri not in ("local", "none"):
        return recipe.track.uri
    root = Path(RUNS) if recipe.out is None else store_root(Path(recipe.out))
    uri = default_uri(root)
    path = sqlite_file(uri)
    is_missing = path is not None and not path.is_file()
    return local_uri(Path(RUNS)) if is_missing else uri


def _name(recipe: Recipe) -> str | None:
    return recipe.model.name if isinstance(recipe.model, ModelSettings) else recipe.model
