"""Hands a trained model over as a plain Hugging Face folder, with a `trimtab.json` of facts about it.

Of a model with an adapter the adapter alone is written, as a plain PEFT folder: its base stays where it came from.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.folder import whole_folder
from trimtab.checkpoint.tensor_file import checksum_of
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.model.adapters import Adapter, adapter_of
from trimtab.model.hub import quiet_transformers

FACTS = "trimtab.json"
_WEIGHTS = ".safetensors"
_HEAD = ("num_labels", "id2label", "label2id", "problem_type")


def export_model(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    tokenizer: Any,
    *,
    card: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """Write a model so that `AutoModelFor….from_pretrained(folder)` loads it; an older export there is replaced.

    Of a model with an adapter only the adapter is written, so that `PeftModel.from_pretrained(base, folder)` loads it.

    Args:
        folder: Where to.
        model: A transformers model; its config carries the label names.
        tokenizer: Its tokenizer, or None.
        card: Facts for `trimtab.json`: task, metrics, step, recipe and the like.
        weights: To be written in the place of those that the model has now: what `weights_to_export` gave.

    Returns:
        The folder.
    """
    bare = _bare(model)
    adapter = adapter_of(bare)
    about = {"trimtab": __version__, **card, **({} if adapter is None else _facts_of_adapter(bare, adapter))}
    facts = json.dumps(_plain(about), indent=1, ensure_ascii=False, allow_nan=False)
    with whole_folder(folder, marker=FACTS, what="model") as place, quiet_transformers():
        if adapter is not None:
            adapter.save(place, weights)
        else:
            _mend_generation_config(bare)
            bare.save_pretrained(place, **({} if weights is None else {"state_dict": dict(weights)}))
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        (place / FACTS).write_text(facts, encoding="utf-8")
    return Path(folder)


def weights_to_export(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that an export of `model` writes, by name: its own tensors, not copies."""
    bare = _bare(model)
    adapter = adapter_of(bare)
    weights: dict[str, torch.Tensor] = bare.state_dict() if adapter is None else adapter.tensors()
    return weights


def _facts_of_adapter(model: Any, adapter: Adapter) -> dict[str, Any]:
    """What is needed to load an adapter again, beside what PEFT's own file says."""
    kind, config = _kind_of(model), model.config
    return {
        "base": adapter.base.name,
        "base_revision": adapter.base.revision,
        "kind": kind,
        "head": {key: getattr(config, key, None) for key in _HEAD} if kind == "sequence-classification" else {},
        "adapter": {"num_parameters": adapter.num_parameters, **_facts_of_base(model)},
    }


def _facts_of_base(model: Any) -> dict[str, Any]:
    """How the base was held while the adapter trained: in which dtype, and how it was quantized."""
    quantized = [m for m in model.modules() if getattr(m._parameters.get("weight"), "quant_state", None) is not None]
    of_quantized = {id(p) for module in quantized for p in module.parameters()}
    num_weights: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad and id(parameter) not in of_quantized:
            num_weights[parameter.dtype] += parameter.numel()
    held_in = num_weights.most_common(1)[0][0] if num_weights else torch.float32
    nf4 = None
    if quantized:
        first: Any = quantized[0]
        held_in = held_in if num_weights else first.compute_dtype
        nf4 = {"compute_dtype": _name_of(first.compute_dtype), "double_quant": bool(first.weight.quant_state.nested)}
    return {"base_dtype": _name_of(held_in), "nf4": nf4}


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kind_of(model: Any) -> str:
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence-classification"
    if name.endswith("ForMaskedLM"):
        return "masked-lm"
    return "seq2seq-lm" if getattr(model.config, "is_encoder_decoder", False) else "causal-lm"


class PatientExport:
    """Exports models to one folder. A model for which there is no room waits in host memory, and the run goes on.

    Attributes:
        problem: Why a model waits; None if none does.

    Args:
        folder: Where to.
        model: A transformers model, whose weights change. Of one with an adapter only the adapter waits.
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
        self._waiting = _copied(weights_to_export(self._model)), card
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


def weight_checksums(folder: str | os.PathLike[str]) -> dict[str, str]:
    """The checksum of every file of weights in an exported folder, by name."""
    return {path.name: checksum_of(path) for path in sorted(Path(folder).glob(f"*{_WEIGHTS}"))}


def why_damaged(folder: str | os.PathLike[str], checksums: Mapping[str, str] | None = None) -> str:
    """What is wrong with the weights of an exported model, in words; empty if nothing is.

    Args:
        folder: Where `export_model` wrote it.
        checksums: What `weight_checksums` gave then. Without them a file that was cut off or lost is still found, a
            changed value is not.
    """
    from safetensors import SafetensorError, safe_open

    place = Path(folder)
    if not place.is_dir():
        return f"{place} is missing"
    names = {path.name for path in place.glob(f"*{_WEIGHTS}")}
    expected = set(checksums or ()) | _shards_of(place) or names or {f"model{_WEIGHTS}"}
    for name in sorted(expected):
        path = place / name
        if name not in names:
            return f"{path} is missing"
        try:
            with safe_open(path, framework="pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{path} was cut off or changed: {error}"
        if checksums is not None and checksum_of(path) != checksums.get(name):
            return f"{path} was changed: its checksum is another one"
    return ""


def _shards_of(folder: Path) -> set[str]:
    """The files among which the weights of a large model are divided, where its index names them."""
    try:
        index = json.loads((folder / f"model{_WEIGHTS}.index.json").read_text(encoding="utf-8"))
        return set(index["weight_map"].values())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


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
