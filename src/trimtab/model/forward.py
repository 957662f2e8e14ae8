"""Call a model for a loss: without labels, without a key-value cache, with decoder inputs."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

IGNORED = -100
NUM_LABELLED = "num_labelled"  # an optional int in a batch; see `run_model`
Batch = Mapping[str, torch.Tensor]


def run_model(model: torch.nn.Module, batch: Batch) -> Any:
    """Call `model` with the inputs in `batch`.

    The labels are not passed to the model, and neither is `num_labelled`: an int that a collator can add to the batch,
    an upper bound of the number of labelled positions that is known without a host-device sync.
    """
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name not in ("labels", NUM_LABELLED)}
    bare = bare_model(model)
    config = getattr(bare, "config", None)
    if _needs_decoder_inputs(bare, config, batch):
        inputs["decoder_input_ids"] = bare.prepare_decoder_input_ids_from_labels(batch["labels"])
    # No key-value cache in training; config.use_cache does not change, because generation needs it later.
    if _uses_cache(config) and "use_cache" in inspect.signature(bare.forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


def _uses_cache(config: Any) -> bool:
    """Whether a model fills a key-value cache by default; multimodal models define it in their text config."""
    if config is None or hasattr(config, "use_cache"):
        return bool(getattr(config, "use_cache", False))
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    return bool(getattr(text_config, "use_cache", False))


def bare_model(model: torch.nn.Module) -> Any:
    """The model inside a DDP wrapper, or the model itself."""
    return getattr(model, "module", model)


def logits_of(outputs: Any) -> torch.Tensor | None:
    """The logits in the output of a model; None if there are none."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, tuple):
        found = outputs[0]
    return found if isinstance(found, torch.Tensor) else None


def _needs_decoder_inputs(model: Any, config: Any, batch: Batch) -> bool:
    """Whether decoder inputs have to be made from the labels, as transformers does in a model called with labels."""
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in batch:
        return False
    has_target_tokens = "labels" in batch and batch["labels"].dim() == 2
    return has_target_tokens and hasattr(model, "prepare_decoder_input_ids_from_labels")
