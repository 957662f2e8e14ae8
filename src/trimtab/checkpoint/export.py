"""Hands a trained model over as a plain Hugging Face folder, with a `trimtab.json` of facts about it.

The folder is written beside its place, synced to disk and renamed into it: a folder of that name is always a whole one.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.errors import CheckpointError
from trimtab.model.hub import quiet_transformers

FACTS = "trimtab.json"


def export_model(
    folder: str | os.PathLike[str], model: torch.nn.Module, tokenizer: Any, *, card: Mapping[str, Any]
) -> Path:
    """Write a model so that `AutoModelFor….from_pretrained(folder)` loads it; an older export there is replaced.

    Args:
        folder: Where to.
        model: A transformers model; its config carries the label names.
        tokenizer: Its tokenizer, or None.
        card: Facts for `trimtab.json`: task, metrics, step, recipe and the like.

    Returns:
        The folder.
    """
    bare = _bare(model)
    target = Path(folder).resolve()
    _refuse_foreign(target)
    facts = json.dumps(_plain({"trimtab": __version__, **card}), indent=1, ensure_ascii=False, allow_nan=False)
    beside = target.with_name(f".{target.name}.writing-{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        with quiet_transformers():
            _mend_generation_config(bare)
            bare.save_pretrained(beside)
            if tokenizer is not None:
                tokenizer.save_pretrained(beside)
        (beside / FACTS).write_text(facts, encoding="utf-8")
        _sync(beside)
        _swap_in(beside, target)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    return Path(folder)


def read_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts that `export_model` wrote into a folder; empty for a folder of somebody else."""
    path = Path(folder) / FACTS
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", "delete the file, or export the model again"
        ) from error
    return facts if isinstance(facts, dict) else {}


def _bare(model: torch.nn.Module) -> Any:
    """The model itself, out of what torch.compile or DDP wrapped around it."""
    inner: Any = model
    while not hasattr(inner, "save_pretrained"):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise CheckpointError(
                f"{type(model).__name__} is no transformers model and cannot be written as a Hugging Face folder",
                "save its state_dict, or build it as a transformers.PreTrainedModel",
            )
    return inner


def _refuse_foreign(target: Path) -> None:
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file, so no model can be written there", "name a folder")
    if target.exists() and not (target / FACTS).exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} holds other files, which the model would replace", "name a folder of its own")


def _mend_generation_config(model: Any) -> None:
    """Some published models have sampling settings without `do_sample`, which transformers refuses to save."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become text, other objects their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def _sync(folder: Path) -> None:
    """Bring everything in a folder to the disk, so that a rename never shows files that a power cut would empty."""
    for path in [*(path for path in folder.rglob("*") if path.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap_in(beside: Path, target: Path) -> None:
    if target.exists():
        outdated = target.with_name(f".{target.name}.outdated-{os.getpid()}")
        shutil.rmtree(outdated, ignore_errors=True)
        target.rename(outdated)
        try:
            beside.rename(target)
        except BaseException:
            outdated.rename(target)
            raise
    else:
        beside.rename(target)
    # also what writers before this one left when they were killed
    for left in target.parent.glob(f".{target.name}.outdated-*"):
        shutil.rmtree(left, ignore_errors=True)
