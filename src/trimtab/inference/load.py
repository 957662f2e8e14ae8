"""A trained model, ready to use: `trimtab.load` takes a run, a folder or a hub name."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trimtab.checkpoint.export import read_facts
from trimtab.errors import ModelError
from trimtab.model.load import load_config, load_model, load_tokenizer, max_positions, newly_initialised, resolve_source


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


def load(source: str | Path, *, device: str | torch.device | None = None, trust_remote_code: bool = False) -> Loaded:
    """Load a model and its tokenizer, ready to predict.

    Args:
        source: A run folder (its best model is taken), a folder of a model, a `.gguf` file or a hub name.
        device: Where to put it; by default the accelerator, if there is one.
        trust_remote_code: Whether Python code that lies beside the model may run.

    Raises:
        ModelError: If there is no such model, or it has no head that predicts.
    """
    name = str(source)
    folder = resolve_source(name)
    facts = read_facts(folder) if Path(folder).is_dir() else {}
    config = load_config(name, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    kind, task_name = _purpose(name, config, tokenizer)
    model: Any = load_model(name, kind, {}, tokenizer, trust_remote_code=trust_remote_code)
    if newly_initialised(model):
        parts = ", ".join(sorted(newly_initialised(model))[:2])
        raise ModelError(f"{name} was never trained for {task_name}: it has no weights for {parts}", "train it first")
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    model.to(device)
    return Loaded(model, tokenizer, facts.get("task", task_name), facts)


def _purpose(name: str, config: Any, tokenizer: Any) -> tuple[str, str]:
    """The kind of model and the task that the class it was saved from tells."""
    architecture = next(iter(getattr(config, "architectures", None) or []), None)
    if architecture is None or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal-lm", "chat" if tokenizer.chat_template else "causal-lm"
    if architecture.endswith("ForSequenceClassification"):
        regresses = config.problem_type == "regression" or (config.problem_type is None and config.num_labels == 1)
        return "sequence-classification", "regress" if regresses else "classify"
    if architecture.endswith("ForMaskedLM"):
        return "masked-lm", "masked-lm"
    if (
        getattr(config, "is_encoder_decoder", False)
        and not architecture.endswith("Model")
        or architecture
        in (
            "EncoderDecoderModel",
            "MarianMTModel",
        )
    ):
        return "seq2seq-lm", "seq2seq"
    raise ModelError(
        f"{name} is a {architecture}, which has no head that predicts",
        f"train one: trimtab train --model {name} --data FILE",
    )
