"""`trimtab.load`: load a trained model from a run, a folder or the Hub, ready for inference."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts
from trimtab.compress.clustered_file import is_clustered
from trimtab.compress.clustered_model import load_clustered_model
from trimtab.compress.weight_formats import check_stored_formats
from trimtab.errors import ModelError
from trimtab.inference.adapted import load_adapted_model, load_adapter_tokenizer, model_kind, read_adapter_source
from trimtab.inference.onnx_model import OnnxModel, is_onnx
from trimtab.model.hub import is_adapter
from trimtab.model.load import (
    is_quantized_config,
    is_quantized_model,
    load_config,
    load_model,
    load_tokenizer,
    max_positions,
    newly_initialized,
    resolve_source,
)
from trimtab.tracking.mlflow.registry import best_name, local_source


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, with its tokenizer.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task_name: Its task: "classify", "regress", "causal-lm", "chat", "seq2seq" or "masked-lm".
        facts: The content of trimtab.json; empty for models that trimtab did not train.
    """

    model: Any
    tokenizer: Any
    task_name: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        device: torch.device = self.model.device
        return device

    @property
    def max_length(self) -> int | None:
        """Maximum number of input tokens: as in training, at most the model's positions; None if unlimited."""
        settings = self.facts.get("recipe", {}).get("data", {})
        limits = [self.facts.get("max_length") or settings.get("max_length"), max_positions(self.model)]
        return min((limit for limit in limits if limit), default=None)


def load(
    source: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
    decode: str = "once",
) -> LoadedModel:
    """Load a model and its tokenizer, ready for inference.

    Args:
        source: A run folder (loads its best model), a folder of a model or of an adapter, a `.gguf` file, a Hub name,
            or a model on a tracking server: best:EXPERIMENT, models:/NAME@best. The base of an adapter is loaded from
            the path that it was trained with.
        device: Device of the model; by default the accelerator, if there is one.
        dtype: dtype of the weights; for an adapter, of its base. By default fp32, or 4 bits for an adapter that was
            trained on a 4-bit base. A quantized model is loaded in its own format and has no other.
        trust_remote_code: Whether Python code in the model's folder may run.
        decode: For a clustered model: "once" decodes all weights now (fast), "on-use" a weight at a time in each
            forward pass (small memory).

    Raises:
        ModelError: If the model does not exist, or has no head for a task.
    """
    name = local_source(str(source))
    folder = resolve_source(name, adapters=True)
    place = Path(folder).parent if folder.endswith(".gguf") else Path(folder)
    facts = read_facts(place) if place.is_dir() else {}
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    model: Any
    options: dict[str, Any]
    if is_adapter(folder):
        adapter = read_adapter_source(folder, trust_remote_code=trust_remote_code)
        tokenizer = load_adapter_tokenizer(adapter, trust_remote_code=trust_remote_code)
        options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = load_adapted_model(adapter, tokenizer, torch.device(device), **options)
        task_name = _task_name(adapter.kind, model.config, tokenizer)
    elif is_clustered(folder):
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        kind = model_kind(name, config := load_config(name, trust_remote_code=trust_remote_code))
        options = {"dtype": dtype or torch.float32, "decode": decode, "trust_remote_code": trust_remote_code}
        model, task_name = load_clustered_model(folder, kind, **options), _task_name(kind, config, tokenizer)
    elif is_onnx(folder):
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        model, device = OnnxModel(folder), "cpu"
        task_name = _task_name(model_kind(name, model.config), model.config, tokenizer)
    else:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        model, task_name = _load_whole(name, tokenizer, dtype, torch.device(device), trust_remote_code)
    if not is_quantized_model(model):  # loaded to its device
        model.to(device)
    return LoadedModel(model, tokenizer, facts.get("task", task_name), facts)


def best_model(experiment: str, metric: str | None = None, *, uri: str | None = None, **options: Any) -> LoadedModel:
    """Load the best model of an experiment from its tracking server, ready for inference.

    Args:
        experiment: Name of the experiment.
        metric: Metric to rank by, such as accuracy; by default the one that selected the models.
        uri: Tracking URI; by default MLFLOW_TRACKING_URI, or the store below `runs`.
        options: Arguments of `load`.

    Raises:
        RecipeError: If the experiment or metric does not exist, with similar names.
    """
    return load(local_source(best_name(experiment, metric), uri), **options)


def _load_whole(
    name: str, tokenizer: Any, dtype: torch.dtype | None, device: torch.device, trust_remote_code: bool
) -> tuple[Any, str]:
    config = load_config(name, trust_remote_code=trust_remote_code)
    kind = model_kind(name, config)
    task_name = _task_name(kind, config, tokenizer)
    form: dict[str, Any] = {"dtype": dtype or torch.float32}
    if is_quantized_config(config) and not name.endswith(".gguf"):
        if dtype is not None:
            raise ModelError(f"{name} is quantized and cannot be loaded in {dtype}", "leave dtype out")
        check_stored_formats(name, config.quantization_config, device)
        form = {"dtype": None, "device": device}
    model = load_model(name, kind, {}, tokenizer, trust_remote_code=trust_remote_code, **form)
    if newly_initialized(model):
        parts = ", ".join(sorted(newly_initialized(model))[:2])
        raise ModelError(
            f"{name} is not trained for {task_name}: it has no weights for {parts}",
            f"trimtab train --model {name} --data FILE",
        )
    return model, task_name


def _task_name(kind: str, config: Any, tokenizer: Any) -> str:
    if kind == "causal-lm":
        return "chat" if tokenizer.chat_template else "causal-lm"
    if kind == "sequence-classification":
        regresses = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        return "regress" if regresses else "classify"
    return "seq2seq" if kind == "seq2seq-lm" else "masked-lm"
