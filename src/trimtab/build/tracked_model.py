"""Resolve the model of a recipe on a tracking server, once per run."""

from pathlib import Path

from trimtab.build.consent import check_address_is_given
from trimtab.log import say
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.runs.run_folder import find_run
from trimtab.tracking.mlflow.registry import TrackedModel, fetch_model, find_model, is_record, is_tracked_model
from trimtab.tracking.mlflow.uri import RUNS, default_uri, local_uri, sqlite_file, store_root

MODEL_SOURCE = "model_source"  # key in run.json


def find_tracked_model(recipe: Recipe, run: Path | None = None) -> TrackedModel | None:
    """Find the exact model version that a recipe names; None if the model is not on a server.

    Args:
        recipe: The recipe.
        run: The folder of a run to resume, which keeps the model that it started with.
    """
    name = _name(recipe)
    if name is None or not is_tracked_model(name):
        return None
    uri = server_of(recipe)
    before = ((find_run(run) if run is not None else None) or {}).get("model_source")
    if run is not None and before is not None and is_record(before) and before["asked"] == name:
        found = TrackedModel.from_dict(before, uri)
        if found.uri != uri:
            check_address_is_given(run, found.uri, f"if you trust it: --set track.uri={found.uri}")
        say(f"{name} is {found.words}, the same as at the start of the run")
        return found
    found = find_model(name, uri)
    say(f"{name} is {found.words} ({found.exact})")
    return found


def with_model_here(recipe: Recipe, found: TrackedModel | None) -> Recipe:
    """Return the recipe with the local folder of that model, downloaded if necessary."""
    if found is None:
        return recipe
    folder = str(fetch_model(found))
    model = recipe.model.model_copy(update={"name": folder}) if isinstance(recipe.model, ModelSettings) else folder
    return recipe.model_copy(update={"model": model})


def server_of(recipe: Recipe) -> str:
    """The server to search for models: the recipe's, else the local store next to the run, else the one in `runs`."""
    if recipe.track.uri not in ("local", "none"):
        return recipe.track.uri
    root = Path(RUNS) if recipe.out is None else store_root(Path(recipe.out))
    uri = default_uri(root)
    path = sqlite_file(uri)
    is_missing = path is not None and not path.is_file()
    return local_uri(Path(RUNS)) if is_missing else uri


def _name(recipe: Recipe) -> str | None:
    return recipe.model.name if isinstance(recipe.model, ModelSettings) else recipe.model
