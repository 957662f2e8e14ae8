"""Replace a user's optimizer by its 8-bit counterpart with the same parameters, groups and settings."""

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
_UNSUPPORTED = ("amsgrad", "maximize", "capturable", "differentiable")  # by the 8-bit kernels


def eight_bit_obstacle(optimizer: torch.optim.Optimizer) -> str | None:
    """The reason why an optimizer cannot have 8-bit state, as text; None if it can."""
    name = type(optimizer).__name__
    if type(optimizer) not in _FORMS:
        return f"{name} has no 8-bit version"
    if optimizer.state:
        return f"this {name} already has state"
    for group in optimizer.param_groups:
        used = [option for option in _UNSUPPORTED if group.get(option)]
        if isinstance(group["lr"], torch.Tensor):
            used.append("a tensor as learning rate")
        if _FORMS[type(optimizer)] is Adam8bit and group.get("decoupled_weight_decay"):
            used.append("decoupled_weight_decay")
        if used:
            return f"the 8-bit version of {name} does not support {', '.join(used)}"
    if not has_package("bitsandbytes"):
        return f"bitsandbytes is not installed ({install_line('bitsandbytes')})"
    return None


def to_eight_bit(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
    """Build the 8-bit counterpart of an optimizer.

    Args:
        optimizer: An optimizer for which `eight_bit_obstacle` returns None.
        groups: Its parameter groups, which are shared and not copied: a schedule that writes to them keeps working.
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
