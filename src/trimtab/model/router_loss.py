"""The auxiliary losses of mixture-of-experts models, which keep routers from sending every token to the same experts.

With `output_router_logits: true` in its config a model computes them in each forward, and transformers adds them, times
the coefficients of the config, to the loss that it computes from labels. Our losses run models without labels, so that
the same terms are added here. They are no sums over tokens, so that cutting a batch into micro-batches changes them:
what is minimised is their mean over the micro-batches, weighted by tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trimtab.errors import LossError
from trimtab.log import say_once
from trimtab.model.forward import bare_model

_AUXILIARY, _Z_LOSS = ("router_aux_loss_coef", "aux_loss_coef"), ("router_z_loss_coef",)
# Fields of a model's output, and the names under which the coefficient of each may stand.
_TERMS = {
    "aux_loss": _AUXILIARY,
    "encoder_aux_loss": _AUXILIARY,
    "decoder_aux_loss": _AUXILIARY,
    "encoder_z_loss": _Z_LOSS,
    "decoder_z_loss": _Z_LOSS,
}


def router_loss(model: torch.nn.Module, outputs: Any) -> torch.Tensor | None:
    """What transformers would add to the loss of this forward for the routers of the model; None for nothing.

    Args:
        model: The model, or its wrapper for several processes.
        outputs: What it gave, called without labels.

    Raises:
        LossError: If the config asks for such a loss and the model computes it from labels alone, or if the coefficient
            of a loss is not known.
    """
    bare = bare_model(model)
    total: torch.Tensor | None = None
    for name, coefficient_names in _TERMS.items():
        term = _field(outputs, name)
        if isinstance(term, torch.Tensor):  # Switch gives the number 0 where a stack has no routers
            weighted = term.float() * _coefficient(bare, name, coefficient_names)
            total = weighted if total is None else total + weighted
    if total is None and _is_asked_for(bare):
        _explain_absence(bare)
    return total


def _field(outputs: Any, name: str) -> Any:
    return outputs.get(name) if isinstance(outputs, Mapping) else getattr(outputs, name, None)


def _coefficient(model: Any, term: str, names: tuple[str, ...]) -> float:
    """From the model, which has renamed some of them, or else from its config."""
    for owner in (model, *_configs(model)):
        for name in names:
            if isinstance(found := getattr(owner, name, None), int | float):
                return float(found)
    raise LossError(
        f"{type(model).__name__} gives {term}, and no coefficient for it in {' or '.join(names)}",
        "output_router_logits: false in the model's config, or a loss function of your own",
    )


def _configs(model: Any) -> list[Any]:
    config = getattr(model, "config", None)
    if config is None:
        return []
    return [config, *([config.get_text_config()] if hasattr(config, "get_text_config") else [])]


def _is_asked_for(model: Any) -> bool:
    # plain attributes: `get_text_config` searches for names, which takes longer than all else here, in each forward
    config = getattr(model, "config", None)
    owners = (config, getattr(config, "text_config", None))
    return any(getattr(owner, "output_router_logits", None) is True for owner in owners)


def _explain_absence(model: Any) -> None:
    """Refuse a model that would add a term if it were given labels; for others transformers adds nothing either."""
    name = type(model).__name__
    if any(hasattr(model, coefficient) for coefficient in (*_AUXILIARY, *_Z_LOSS)):
        raise LossError(
            f"the config of {name} asks for the auxiliary loss of its routers (output_router_logits), and the model "
            "does not give it when it is called without labels: the routers would train without that loss",
            "output_router_logits: false in the model's config, or a loop of your own around trimtab.Engine",
        )
    say_once(f"{name} has no auxiliary loss for its routers: output_router_logits changes nothing in its training")
