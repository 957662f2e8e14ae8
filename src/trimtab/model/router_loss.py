"""Auxiliary router losses of mixture-of-experts models, which balance the load of the experts.

With `output_router_logits: true` in its config, a model computes them in each forward, and transformers adds them,
times coefficients from the config, to the loss that it computes from labels. Our losses call models without labels, so
the same terms are added here. They are not sums over tokens, so they depend on the split into micro-batches: the loss
is their mean over the micro-batches, weighted by tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.errors import LossError
from trimtab.log import log_info_once
from trimtab.model.forward import bare_model

_AUXILIARY, _Z_LOSS = ("router_aux_loss_coef", "aux_loss_coef"), ("router_z_loss_coef",)
# Fields of a model's output, and possible names of their coefficients.
_TERMS = {
    "aux_loss": _AUXILIARY,
    "encoder_aux_loss": _AUXILIARY,
    "decoder_aux_loss": _AUXILIARY,
    "encoder_z_loss": _Z_LOSS,
    "decoder_z_loss": _Z_LOSS,
}


def router_loss(model: torch.nn.Module, outputs: Any) -> torch.Tensor | None:
    """The router loss that transformers would add to the loss of this forward; None if there is none.

    Args:
        model: The model or its DDP wrapper.
        outputs: Its output, called without labels.

    Raises:
        LossError: The config requests a router loss that the model computes only if called with labels, or the
            coefficient of a loss is unknown.
    """
    bare = bare_model(model)
    total: torch.Tensor | None = None
    for name, coefficient_names in _TERMS.items():
        term = _field(outputs, name)
        if isinstance(term, torch.Tensor):  # Switch Transformers return the int 0 for a stack without routers
            weighted = term.float() * _coefficient(bare, name, coefficient_names)
            total = weighted if total is None else total + weighted
    if total is None and _is_requested(bare):
        _explain_absence(bare)
    return total


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _coefficient(model: Any, term: str, names: tuple[str, ...]) -> float:
    """The coefficient from the model, which renames some of them, or else from its config."""
    for owner in (model, *_configs(model)):
        for name in names:
            if isinstance(found := getattr(owner, name, None), int | float):
                return float(found)
    raise LossError(
        f"{type(model).__name__} returns {term}, but has no coefficient for it in {' or '.join(names)}",
        "set output_router_logits: false in the model's config, or pass your own loss function",
    )


def _configs(model: Any) -> list[Any]:
    config = getattr(model, "config", None)
    if config is None:
        return []
    return [config, *([config.get_text_config()] if hasattr(config, "get_text_config") else [])]


def _is_requested(model: Any) -> bool:
    # not `get_text_config`, which is slow and would run in each forward
    config = getattr(model, "config", None)
    owners = (config, getattr(config, "text_config", None))
    return any(getattr(owner, "output_router_logits", None) is True for owner in owners)


def _explain_absence(model: Any) -> None:
    """Refuse a model that adds a router loss only if called with labels; transformers adds none for others."""
    name = type(model).__name__
    if any(hasattr(model, coefficient) for coefficient in (*_AUXILIARY, *_Z_LOSS)):
        raise LossError(
            f"the config of {name} requests the auxiliary loss of its routers (output_router_logits), but the model "
            "does not return it when called without labels: the routers would be trained without that loss",
            "set output_router_logits: false in the model's config, or use your own loop with trimtab.Engine",
        )
    log_info_once(f"{name} has no auxiliary loss for its routers: output_router_logits has no effect on its training")
