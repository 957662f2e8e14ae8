"""Hands a trained model over as a plain Hugging Face folder, with a `trimtab.json` of facts about it."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.folder import whole_folder
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.model.hub import quiet_transformers

FACTS = "trimtab.json"


def export_model(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    tokenizer: Any,
    *,
    card: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a model so that `AutoModelFor….from_pretrained(folder)` loads it; an older export there is replaced.

    Args:
        folder: Where to.
        model: A transformers model; its config carries the label names.
        tokenizer: Its tokenizer, or None.
        card: Facts for `trimtab.json`: task, metrics, step, recipe and the like.
        weights: To be written in the place of those that the model has now.

    Returns:
        The folder.
    """
    bare = _bare(model)
    facts = json.dumps(_plain({"trimtab": __version__, **card}), indent=1, ensure_ascii=False, allow_nan=False)
    with whole_folder(folder, marker=FACTS, what="model") as place, quiet_transformers():
        _mend_generation_config(bare)
        bare.save_pretrained(place, **({} if weights is None else {"state_dict": dict(weights)}))
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        (place / FACTS).write_text(facts, encoding="utf-8")
    return Path(folder)


class PatientExport:
    """Exports models to one folder. A model for which there is no room waits in host memory, and the run goes on.

    Attributes:
        problem: Why a model waits; None if none does.

    Args:
        folder: Where to.
        model: A transformers model, whose weights change.
        tokenizer: Its tokenizer, or None.
    """

    def __init__(self, folder: str | os.PathLike[str], model: torch.nn.Module, tokenizer: Any) -> None:
        self.problem: CheckpointError | None = None
        self._folder, self._model, self._tokenizer = Path(folder), model, tokenizer
        self._waiting: tuple[dict[str, torch.Tensor], Mapping[str, Any]] | None = None

    def write(self, card: Mapping[str, Any]) -> bool:
        """Write the model as it is now, or let it wait; one that waited before is given up for it.

        Returns:
            Whether it is written.
        """
        self._waiting = None
        if self._export(card, None):
            return True
        self._waiting = _copied(_bare(self._model).state_dict()), card
        if self.problem is not None:
            say(f"{self.problem.problem}: it waits in memory, and the training goes on. {self.problem.cure}")
        return False

    def write_waiting(self) -> bool:
        """Try again.

        Returns:
            Whether a model waited and is written now.
        """
        if self._waiting is None:
            return False
        weights, card = self._waiting
        if not self._export(card, weights):
            return False
        say(f"the model that waited is in {self._folder} now")
        self._waiting = None
        return True

    def _export(self, card: Mapping[str, Any], weights: dict[str, torch.Tensor] | None) -> bool:
        from safetensors import SafetensorError

        try:
            export_model(self._folder, self._model, self._tokenizer, card=card, weights=weights)
        except (OSError, SafetensorError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            problem = f"the model could not be written to {self._folder}: {why}"
            self.problem = CheckpointError(problem, "make room on that disk, or make the folder writable")
            return False
        self.problem = None
        return True


def _copied(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies on the host; weights that are one tensor under two names stay one."""
    copies: dict[Any, torch.Tensor] = {}
    copied = {}
    for name, tensor in weights.items():
        key = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        copied[name] = copies[key]
    return copied


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
