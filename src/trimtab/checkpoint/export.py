"""Export a trained model as a plain Hugging Face folder, with facts about it in `trimtab.json` and a model card.

For a model with an adapter only the adapter is written, as a plain PEFT folder that refers to its base.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from trimtab import __version__
from trimtab.checkpoint.folder import atomic_folder
from trimtab.checkpoint.model_card import CARD, CardSubject, model_card
from trimtab.checksums import checksum_of
from trimtab.errors import CheckpointError
from trimtab.log import say
from trimtab.model.adapters import Adapter, adapter_of
from trimtab.model.fp8 import Fp8, Fp8Linear
from trimtab.model.hub import file_damage, quiet_transformers, shards_of
from trimtab.model.nf4 import Nf4, is_nf4
from trimtab.model.quantization import Quantization, is_quantized
from trimtab.optim.host_update import masters_of

FACTS = "trimtab.json"
_KINDS_OF_FACTS = {
    **dict.fromkeys(("recipe", "head", "adapter", "columns", "clustered"), dict),
    **dict.fromkeys(("task", "kind", "base"), str),
    **dict.fromkeys(("max_length", "step"), int),
}
_WEIGHTS = ".safetensors"
_HEAD = ("num_labels", "id2label", "label2id", "problem_type")


def export_model(
    folder: str | os.PathLike[str],
    model: torch.nn.Module,
    tokenizer: Any,
    *,
    card: Mapping[str, Any],
    weights: Mapping[str, torch.Tensor] | None = None,
    marker: str | None = FACTS,
) -> Path:
    """Write a model for `AutoModelFor….from_pretrained(folder)`; an older export in the folder is replaced.

    For a model with an adapter only the adapter is written, for `PeftModel.from_pretrained(base, folder)`; only
    `trimtab.load` can load a side network.

    Args:
        folder: The folder to write.
        model: A transformers model; its config contains the label names.
        tokenizer: Its tokenizer, or None.
        card: Facts for `trimtab.json`, such as task, metrics, step and recipe.
        weights: Weights to write instead of the model's current ones, with the names of `weights_to_export`.
        marker: The file without which a folder that is not empty is refused; None replaces any folder.

    Returns:
        The folder.
    """
    bare = _unwrap(model)
    adapter = adapter_of(bare)
    about = {"trimtab": __version__, **card, **({} if adapter is None else _facts_of_adapter(bare, adapter))}
    facts = json.dumps(as_json(about), indent=1, ensure_ascii=False, allow_nan=False)
    with atomic_folder(folder, marker=marker, what="model") as place, quiet_transformers():
        if adapter is not None:
            adapter.save(place, weights)
        else:
            _mend_generation_config(bare)
            if weights is None and masters_of(bare):
                weights = weights_to_export(bare)
            bare.save_pretrained(place, **({} if weights is None else {"state_dict": dict(weights)}))
        if tokenizer is not None:
            tokenizer.save_pretrained(place)
        (place / FACTS).write_text(facts, encoding="utf-8")
        (place / CARD).write_text(model_card(json.loads(facts), _card_subject(bare, adapter)), encoding="utf-8")
    return Path(folder)


def _card_subject(model: Any, adapter: Adapter | None) -> CardSubject:
    kind = kind_of(model)
    if adapter is None:
        return CardSubject(kind)
    if not adapter.is_side_network:
        return CardSubject(kind, "peft", adapter.base.name or None)
    note = "A side network for a frozen base model. Only trimtab can load it; transformers' `from_pretrained` cannot."
    return CardSubject(kind, "side-network", adapter.base.name or None, notes=(note,))


def weights_to_export(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that an export of `model` writes, by name; they are not copied."""
    bare = _unwrap(model)
    adapter = adapter_of(bare)
    weights: dict[str, torch.Tensor] = adapter.tensors() if adapter else bare.state_dict() | masters_of(bare)
    return weights


def _facts_of_adapter(model: Any, adapter: Adapter) -> dict[str, Any]:
    """Return what is needed to load an adapter in addition to PEFT's own file."""
    kind, config = kind_of(model), model.config
    return {
        "base": adapter.base.name,
        "base_revision": adapter.base.revision,
        "kind": kind,
        "head": {key: getattr(config, key, None) for key in _HEAD} if kind == "sequence-classification" else {},
        "adapter": {"num_parameters": adapter.num_parameters, **_facts_of_base(model)},
    }


def _facts_of_base(model: Any) -> dict[str, Any]:
    """Return the dtype and the quantization of the base while the adapter was trained."""
    quantization = _find_quantization(model)
    of_quantized = {id(p) for module in model.modules() if is_quantized(module) for p in module.parameters()}
    num_weights: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.requires_grad and id(parameter) not in of_quantized:
            num_weights[parameter.dtype] += parameter.numel()
    base_dtype = num_weights.most_common(1)[0][0] if num_weights else torch.float32
    facts: dict[str, Any] = {"base_dtype": _dtype_name(base_dtype), "nf4": None}
    if quantization is not None:
        settings = asdict(quantization) | {"compute_dtype": _dtype_name(quantization.compute_dtype)}
        facts |= {quantization.name: settings}
        facts["base_dtype"] = facts["base_dtype"] if num_weights else settings["compute_dtype"]
    return facts


def _find_quantization(model: torch.nn.Module) -> Quantization | None:
    module: Any
    for module in model.modules():
        if is_nf4(module):
            return Nf4(module.compute_dtype, bool(module.weight.quant_state.nested))
        if isinstance(module, Fp8Linear):
            return Fp8(module.compute_dtype)
    return None


def read_quantization(facts: Mapping[str, Any]) -> Quantization | None:
    """Return how the base of an exported adapter was quantized, from the facts about it."""
    about = facts.get("adapter") or {}
    for kind in (Nf4, Fp8):
        settings = about.get(kind.name)
        if settings:
            return kind(**settings | {"compute_dtype": getattr(torch, settings["compute_dtype"])})
    return None


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kind_of(model: Any) -> str:
    """Return the kind of a model, as in `load_model`, from its class."""
    name = type(model).__name__
    if name.endswith("ForSequenceClassification"):
        return "sequence-classification"
    if name.endswith("ForMaskedLM"):
        return "masked-lm"
    return "seq2seq-lm" if getattr(model.config, "is_encoder_decoder", False) else "causal-lm"


class RetryingExport:
    """Exports a model to a folder repeatedly. If a write fails, a copy is kept in host memory and written later.

    Attributes:
        problem: Why a model is pending; None if none is.

    Args:
        folder: The folder to write, which belongs to the run: whatever is in it is replaced.
        model: A transformers model, whose weights change. If it has an adapter, only the adapter is copied.
        tokenizer: Its tokenizer, or None.
    """

    def __init__(self, folder: str | os.PathLike[str], model: torch.nn.Module, tokenizer: Any) -> None:
        self.problem: CheckpointError | None = None
        self._folder, self._model, self._tokenizer = Path(folder), model, tokenizer
        self._pending: tuple[dict[str, torch.Tensor], Mapping[str, Any]] | None = None

    def write(self, card: Mapping[str, Any]) -> bool:
        """Write the model with its current weights, or keep a copy of them; an older pending model is discarded.

        Returns:
            Whether it was written.
        """
        self._pending = None
        if self._export(card, None):
            return True
        self._pending = _copy_to_host(weights_to_export(self._model)), card
        if self.problem is not None:
            say(
                f"{self.problem.problem}: the model is kept in host memory, and training continues. {self.problem.cure}"
            )
        return False

    def write_pending(self) -> bool:
        """Try again to write a pending model.

        Returns:
            Whether a model was pending and is written now.
        """
        if self._pending is None:
            return False
        weights, card = self._pending
        if not self._export(card, weights):
            return False
        say(f"the pending model was written to {self._folder}")
        self._pending = None
        return True

    def _export(self, card: Mapping[str, Any], weights: dict[str, torch.Tensor] | None) -> bool:
        from safetensors import SafetensorError

        try:
            export_model(self._folder, self._model, self._tokenizer, card=card, weights=weights, marker=None)
        except (OSError, SafetensorError) as error:
            why = (error.strerror if isinstance(error, OSError) else None) or error
            problem = f"the model could not be written to {self._folder}: {why}"
            self.problem = CheckpointError(problem, "free space on that disk, or make the folder writable")
            return False
        self.problem = None
        return True


def _copy_to_host(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy weights to the host; tied weights stay tied."""
    copies: dict[Any, torch.Tensor] = {}
    copied = {}
    for name, tensor in weights.items():
        key = tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        copied[name] = copies[key]
    return copied


def weight_checksums(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Compute the checksum of every weight file in an exported folder, by name."""
    return {path.name: checksum_of(path) for path in sorted(Path(folder).glob(f"*{_WEIGHTS}"))}


def find_export_problem(folder: str | os.PathLike[str], checksums: Mapping[str, str] | None = None) -> str:
    """Return the problem with the files of an exported model; empty if there is none.

    Args:
        folder: The folder that `export_model` wrote.
        checksums: The result of `weight_checksums` at that time. Without it, truncated and missing files are still
            detected, changed values are not.
    """
    place = Path(folder)
    if not place.is_dir():
        return f"{place} is missing"
    names = {path.name for path in place.glob(f"*{_WEIGHTS}")}
    expected = set(checksums or ()) | shards_of(place) or names or {f"model{_WEIGHTS}"}
    for name in sorted(expected):
        path = place / name
        if name not in names:
            return f"{path} is missing"
        if damage := file_damage(path):
            return damage
        if checksums is not None and checksum_of(path) != checksums.get(name):
            return f"{path} is damaged: its checksum does not match"
    return next(filter(None, map(file_damage, sorted(place.glob("*.json")))), "")


def read_facts(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the facts that `export_model` wrote into a folder; empty for any other folder."""
    path = Path(folder) / FACTS
    if not path.is_file():
        return {}
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        facts = facts if isinstance(facts, dict) else {}
        for key, kind in _KINDS_OF_FACTS.items():
            if not isinstance(facts.get(key), kind | None):
                raise ValueError(f"{key} is {facts[key]!r:.100}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", "delete the file, or export the model again"
        ) from error
    return facts


def _unwrap(model: torch.nn.Module) -> Any:
    """Return the model inside the wrappers of torch.compile and DDP."""
    inner: Any = model
    while not hasattr(inner, "save_pretrained"):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
        if inner is None:
            raise CheckpointError(
                f"{type(model).__name__} is not a transformers model and cannot be exported as a Hugging Face folder",
                "save its state_dict, or build it as a transformers.PreTrainedModel",
            )
    return inner


def _mend_generation_config(model: Any) -> None:
    """Set `do_sample` in generation settings of published models that lack it, which transformers refuses to save."""
    config = getattr(model, "generation_config", None)
    if config is None:
        return
    try:
        config.validate(strict=True)
    except ValueError:
        config.do_sample = True


def as_json(value: Any) -> Any:
    """Convert a value to JSON types; numbers that are not finite and unknown objects become text."""
    if isinstance(value, Mapping):
        return {str(key): as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        return as_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)
