"""How a model is called for its loss: without labels, without a cache, with what a decoder reads."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch

IGNORED = -100
NUM_LABELLED = "num_labelled"  # an optional number in a batch; see `run_model`
Batch = Mapping[str, torch.Tensor]


def run_model(model: torch.nn.Module, batch: Batch) -> Any:
    """What `model` gives for `batch`.

    Its labels are kept from the model, and so is `num_labelled`: an int (no tensor) that a collator may put beside the
    labels, at least as large as the number of positions with a label, so that nobody has to ask the device for it.
    """
    inputs: dict[str, Any] = {name: value for name, value in batch.items() if name not in ("labels", NUM_LABELLED)}
    bare = bare_model(model)
    config = getattr(bare, "config", None)
    if _needs_decoder_inputs(bare, config, batch):
        inputs["decoder_input_ids"] = bare.prepare_decoder_input_ids_from_labels(batch["labels"])
    # Keys and values kept for generation are never used here. The config keeps its own value, for who generates later.
    if getattr(config, "use_cache", False) and "use_cache" in inspect.signature(bare.forward).parameters:
        inputs.setdefault("use_cache", False)
    return model(**inputs)


def bare_model(model: torch.nn.Module) -> Any:
    """The model inside a wrapper for several processes, or the model itself."""
    return getattr(model, "module", model)


def logits_of(outputs: Any) -> torch.Tensor | None:
    """The logits in what a model gave, or None where there are none."""
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits")
    elif hasattr(outputs, "logits"):
        found = outputs.logits
    elif isinstance(outputs, tuple):
        found = outputs[0]
    return found if isinstance(found, torch.Tensor) else None


def _needs_decoder_inputs(model: Any, config: Any, batch: Batch) -> bool:
    """Whether a decoder reads the labels, moved by one: a model that is given labels does so by itself."""
    if not getattr(config, "is_encoder_decoder", False) or "decoder_input_ids" in batch:
        return False
    has_target_tokens = "labels" in batch and batch["labels"].dim() == 2
    return has_target_tokens and hasattr(model, "prepare_decoder_input_ids_from_labels")
