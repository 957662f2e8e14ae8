"""Models that commands read from their files, weight by weight, and the settings that they write with new weights."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts
from trimtab.compress.weight_files import can_read_files
from trimtab.inference.model_kind import model_kind
from trimtab.model.hub import shards_of
from trimtab.model.load import load_config, load_skeleton

_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class ModelFiles:
    """The files of a model.

    Args:
        source: Its folder.
        kind: Its kind, as in `load_model`.
        paths: Its safetensors files, in order.
        skeleton: The model on the meta device.
    """

    source: str
    kind: str
    paths: list[Path]
    skeleton: Any


def open_files(source: str, dtype: torch.dtype = torch.float32) -> ModelFiles | None:
    """Return the files of a model if its weights can be read from them one at a time; None if not.

    Args:
        source: A folder; other sources have no files that can be read in this way.
        dtype: Dtype of the skeleton.
    """
    paths = _weight_files(Path(source))
    if not paths:
        return None
    kind = model_kind(source, load_config(source), read_facts(source).get("task"))
    skeleton = load_skeleton(source, kind, {}, None, dtype=dtype)
    return ModelFiles(source, kind, paths, skeleton) if can_read_files(paths, skeleton) else None


def _weight_files(folder: Path) -> list[Path]:
    """Return the files that `from_pretrained` reads: the single one, else those of the index."""
    single = folder / "model.safetensors"
    return [single] if single.is_file() else [folder / name for name in sorted(shards_of(folder))]


def save_settings(source: str, config: Any, tokenizer: Any, folder: Path) -> dict[str, Any]:
    """Write everything about a model except its weights, and return the facts in its own folder."""
    place = Path(source)
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if (place / _GENERATION).is_file():
        shutil.copyfile(place / _GENERATION, folder / _GENERATION)
    return read_facts(place) if place.is_dir() else {}
