"""An optimizer of the user's with its state in 8 bits: the same parameters, groups and settings."""

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.hardware.extras import has_package, install_line
from trimtab.optim.build import rounds_stochastically
from trimtab.optim.quantized import Adam8bit, AdamW8bit, Quantized
from trimtab.optim.stochastic_rounding import RoundedAdam, RoundedAdamW

_FORMS: dict[type, type[Quantized]] = {
    torch.optim.AdamW: AdamW8bit,
    RoundedAdamW: AdamW8bit,
    torch.optim.Adam: Adam8bit,
    RoundedAdam: Adam8bit,
}
_UNKNOWN = ("amsgrad", "maximize", "capturable", "differentiable")  # to the 8-bit kernels


def why_not_eight_bits(optimizer: torch.optim.Optimizer) -> str | None:
    """What keeps an optimizer from having its state in 8 bits, in words; None where nothing does."""
    name = type(optimizer).__name__
    if type(optimizer) not in _FORMS:
        return f"there is no {name} with state of 8 bits"
    if optimizer.state:
        return f"the state of this {name} is there already"
    for group in optimizer.param_groups:
        used = [option for option in _UNKNOWN if group.get(option)]
        if isinstance(group["lr"], torch.Tensor):
            used.append("a learning rate that is a tensor")
        if _FORMS[type(optimizer)] is Adam8bit and group.get("decoupled_weight_decay"):
            used.append("decoupled_weight_decay")
        if used:
            return f"{name} with state of 8 bits has no {', '.join(used)}"
    if not has_package("bitsandbytes"):
        return f"bitsandbytes is not installed ({install_line('bitsandbytes')})"
    return None


def eight_bit_form(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """The optimizer with state of 8 bits.

    Args:
        optimizer: One that nothing keeps from it; see `why_not_eight_bits`.
        groups: Its groups, taken as they are: a schedule that writes into them reaches the new one, too.
    """
    first = groups[0]
    return _FORMS[type(optimizer)](
        list(groups),
        lr=first["lr"],
        betas=first["betas"],
        eps=first["eps"],
        weight_decay=first["weight_decay"],
        rounds_stochastically=rounds_stochastically(optimizer),
    )
