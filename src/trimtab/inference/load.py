"""A trained model, ready to use: `trimtab.load` takes a run, a folder or a hub name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts
from trimtab.errors import ModelError
from trimtab.inference.adapted import kind_of, load_adapted, read_adapter_source, tokenizer_of
from trimtab.model.hub import is_adapter
from trimtab.model.load import load_config, load_model, load_tokenizer, max_positions, newly_initialised, resolve_source
from trimtab.tracking.mlflow.registry import best_name, local_source


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode on its device, with its tokenizer.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
        task_name: What it does: "classify", "regress", "causal-lm", "chat", "seq2seq" or "masked-lm".
        facts: What trimtab wrote about it when it was trained; empty for models of others.
    """

    model: Any
    tokenizer: Any
    task_name: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    @property
    def max_length(self) -> int | None:
        """The longest input in tokens: as in training, or what the model can take; None where nothing limits it."""
        settings = self.facts.get("recipe", {}).get("data", {})
        limits = [self.facts.get("max_length") or settings.get("max_length"), max_positions(self.model)]
        return min((limit for limit in limits if limit), default=None)


def load(
    source: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    trust_remote_code: bool = False,
) -> Loaded:
    """Load a model and its tokenizer, ready to predict.

    Args:
        source: A run folder (its best model is taken), a folder of a model or of an adapter, a `.gguf` file, a hub
            name, or a model on a tracking server: best:EXPERIMENT, models:/NAME@best. The base of an adapter is loaded
            from where it was when the adapter was trained.
        device: Where to put it; by default the accelerator, if there is one.
        dtype: In which the weights are held; of a model with an adapter, those of its base. By default fp32, and 4 bits
            under an adapter that was trained on a base of 4 bits.
        trust_remote_code: Whether Python code that lies beside the model may run.

    Raises:
        ModelError: If there is no such model, or it has no head that predicts.
    """
    name = local_source(str(source))
    folder = resolve_source(name, adapters=True)
    facts = read_facts(folder) if Path(folder).is_dir() else {}
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    model: Any
    if is_adapter(folder):
        adapter = read_adapter_source(folder, trust_remote_code=trust_remote_code)
        tokenizer = tokenizer_of(adapter, trust_remote_code=trust_remote_code)
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
        model = load_adapted(adapter, tokenizer, torch.device(device), **options)
        task_name = _task_of(adapter.kind, model.config, tokenizer)
    else:
        tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
        model, task_name = _whole(name, tokenizer, dtype or torch.float32, trust_remote_code)
    model.to(device)
    return Loaded(model, tokenizer, facts.get("task", task_name), facts)


def best_model(experiment: str, metric: str | None = None, *, uri: str | None = None, **options: Any) -> Loaded:
    """Load the best model of an experiment from its tracking server, ready to predict.

    Args:
        experiment: Its name.
        metric: What makes a model the best, such as accuracy; by default that by which the models were chosen.
        uri: The server; by default MLFLOW_TRACKING_URI, or the store below `runs`.
        options: Those of `load`.

    Raises:
        RecipeError: If there is no such experiment or metric, with names that are near.
    """
    return load(local_source(best_name(experiment, metric), uri), **options)


def _whole(name: str, tokenizer: Any, dtype: torch.dtype, trust_remote_code: bool) -> tuple[Any, str]:
    config = load_config(name, trust_remote_code=trust_remote_code)
    kind = kind_of(name, config)
    task_name = _task_of(kind, config, tokenizer)
    model = load_model(name, kind, {}, tokenizer, trust_remote_code=trust_remote_code, dtype=dtype)
    if newly_initialised(model):
        parts = ", ".join(sorted(newly_initialised(model))[:2])
        raise ModelError(f"{name} was never trained for {task_name}: it has no weights for {parts}", "train it first")
    return model, task_name


def _task_of(kind: str, config: Any, tokenizer: Any) -> str:
    if kind == "causal-lm":
        return "chat" if tokenizer.chat_template else "causal-lm"
    if kind == "sequence-classification":
        regresses = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        return "regress" if regresses else "classify"
    return "seq2seq" if kind == "seq2seq-lm" else "masked-lm"
