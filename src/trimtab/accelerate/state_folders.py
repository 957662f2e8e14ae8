"""Folders of `Accelerator.save_state`: their automatic names, and the files that a script's own hooks write to them."""

import re
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.hooks import RemovableHandle

from trimtab.checkpoint.folder import atomic_folder
from trimtab.errors import RecipeError

_OWN = "trimtab"  # the folder of trimtab's checkpoint inside one that hooks also write to
Hooks = OrderedDict[int, Callable[..., None]]


def registered(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    """Add a hook and return the handle that removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


@contextmanager
def folder_with_hooks(hooks: Hooks, models: list[Any], folder: Path, is_main_process: bool) -> Iterator[Path]:
    """Yield the folder for trimtab's checkpoint, after the hooks have written their files.

    On the main process, the files of the hooks and the checkpoint appear together, or not at all.
    """
    if not hooks:
        yield folder
    elif is_main_process:
        with atomic_folder(folder, marker=_OWN, what="checkpoint") as place:
            _call(hooks, models, place)
            yield place / _OWN
    else:
        _call(hooks, models, folder)
        yield folder / _OWN


def _call(hooks: Hooks, models: list[Any], folder: Path) -> None:
    weights = [model.state_dict() for model in models]
    for hook in hooks.values():
        hook(models, weights, str(folder))


def checkpoint_in(folder: Path) -> Path:
    """Return the folder of trimtab's checkpoint: inside `folder` if hooks have written there too."""
    return folder / _OWN if (folder / _OWN).is_dir() else folder


def numbered_folders(project_dir: Path | None) -> list[Path]:
    """Return `PROJECT_DIR/checkpoints/checkpoint_N`, oldest first."""
    if project_dir is None:
        raise RecipeError(
            "automatic_checkpoint_naming=True needs a project_dir", "Accelerator(project_dir=FOLDER), or pass a folder"
        )
    found = (project_dir / "checkpoints").glob("checkpoint_*")
    named = [path for path in found if re.fullmatch(r"checkpoint_\d+", path.name)]
    return sorted(named, key=lambda path: int(path.name.partition("_")[2]))


def next_folder(config: Any, project_dir: Path | None, is_main_process: bool) -> Path:
    """Return the folder of the next save; the main process deletes the oldest ones beyond `total_limit`."""
    folders = numbered_folders(project_dir)
    assert project_dir is not None
    chosen = project_dir / "checkpoints" / f"checkpoint_{config.iteration}"
    if chosen in folders and is_main_process:
        raise RecipeError(
            f"{chosen} already exists",
            f"set the number: project_config.iteration={len(folders)}, or another project_dir",
        )
    if config.total_limit is not None and is_main_process:
        for old in folders[: max(len(folders) + 1 - config.total_limit, 0)]:
            shutil.rmtree(old)
    return chosen
