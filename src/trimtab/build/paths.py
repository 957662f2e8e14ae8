"""The paths in a recipe: absolute in the stored recipe, so that a run can be resumed from any directory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab.build.data import run_name
from trimtab.data.sources import is_here, make_source_absolute, names_files
from trimtab.recipe.schema import ModelSettings, Recipe
from trimtab.tracking.mlflow.uri import with_sqlite_file

_Change = Callable[[str], str]


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """Return a recipe in which every local path is absolute; names on the Hub or on a server do not change."""
    changed = _with_paths(recipe, source=make_source_absolute, model=_absolute_if_here, folder=_absolute)
    name = run_name(recipe)
    if run_name(changed) != name:  # for a pattern such as *.csv, which has no name
        changed = changed.model_copy(update={"track": changed.track.model_copy(update={"experiment": name})})
    return changed


def with_moved_paths(recipe: Recipe, directory: str | None) -> Recipe:
    """Return a recipe whose files moved together with the run's start directory, for example to another machine.

    A path that no longer exists is searched relative to the current directory, at the place where it was relative to
    the start directory.

    Args:
        recipe: The stored recipe.
        directory: The directory in which the run was started; None if unknown.
    """
    if directory is None or not Path(directory).is_absolute():
        return recipe

    def moved(text: str, exists: Callable[[str], bool]) -> str:
        if not text.startswith("/") or exists(text):
            return text
        there = os.path.relpath(text, directory)
        return there if exists(there) else text

    def is_path(text: str) -> bool:
        return Path(text).exists()

    return _with_paths(
        recipe,
        source=lambda text: moved(text, is_here),
        model=lambda text: moved(text, is_path),
        folder=lambda text: moved(text, is_path),
    )


def _with_paths(recipe: Recipe, *, source: _Change, model: _Change, folder: _Change) -> Recipe:
    """Return a recipe with changed paths: those of data, of models and tokenizers, and of output folders."""
    update: dict[str, Any] = {
        "data": _changed(recipe.data, {"train": source, "eval": source}),
        "checkpoint": _changed(recipe.checkpoint, {"mirror": folder}),
        "track": _changed(recipe.track, {"uri": lambda uri: _in_sqlite(uri, folder)}),
    }
    if recipe.distill is not None:
        update["distill"] = _changed(recipe.distill, {"teacher": model})
    if isinstance(recipe.model, ModelSettings):
        tokenizer = {} if recipe.model.tokenizer == "train" else {"tokenizer": model}  # a word, not a folder
        update["model"] = _changed(recipe.model, {"name": model, **tokenizer})
    else:
        update["model"] = model(recipe.model)
    return recipe.model_copy(update=update)


def _changed(section: Any, changes: dict[str, _Change]) -> Any:
    found = {name: getattr(section, name) for name in changes}
    update: dict[str, Any] = {name: changes[name](value) for name, value in found.items() if isinstance(value, str)}
    lists = {name: value for name, value in found.items() if names_files(value)}
    update |= {name: [Path(changes[name](str(path))) for path in value] for name, value in lists.items()}
    return section.model_copy(update=update)


def _absolute(text: str) -> str:
    return str(Path(os.path.expanduser(text)).absolute())


def _absolute_if_here(text: str) -> str:
    return _absolute(text) if Path(os.path.expanduser(text)).exists() else text


def _in_sqlite(uri: str, folder: _Change) -> str:
    return with_sqlite_file(uri, lambda path: Path(folder(str(path))))
