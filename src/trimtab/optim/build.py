"""Optimizers by name, in the fastest form that the device has. A setting that the optimizer does not use is refused."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say

OPTIMIZERS = ("adamw", "adam", "adagrad", "sgd", "adafactor")

# Fused steps update every parameter in one pass and make no temporary copies. torch has them for these devices.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0}
_USES = {
    "adamw": {"betas", "eps"},
    "adam": {"betas", "eps"},
    "adagrad": {"eps"},
    "sgd": {"momentum"},
    "adafactor": set[str](),
}
_SMALL_FOR_ADAFACTOR = 1e-3


def build_optimizer(
    name: str,
    groups: Sequence[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    momentum: float = 0.0,
    device: str | torch.device = "cpu",
) -> torch.optim.Optimizer:
    """Make an optimizer.

    Args:
        name: "adamw", "adam", "adagrad", "sgd" or "adafactor".
        groups: Parameter groups, with their weight decay; see `trimtab.optim.groups.decay_groups`. The decay of adamw
            and adafactor acts on the weights, that of the others is added to the gradients.
        lr: Learning rate. For adafactor it is relative to the size of each weight, and 1e-2 is usual.
        betas: For adam and adamw.
        eps: For adam, adamw and adagrad.
        momentum: For sgd.
        device: Where the parameters will be when the optimizer steps.

    Returns:
        An optimizer of torch.
    """
    device = torch.device(device)
    _check(name, {"betas": tuple(betas), "eps": eps, "momentum": momentum}, lr)
    fused = True if device.type in _FUSED_DEVICES else None  # None: torch takes foreach where the device has it
    params: Any = list(groups)
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
    if name == "adam":
        return torch.optim.Adam(params, lr=lr, betas=betas, eps=eps, fused=fused)
    if name == "sgd":
        # torch's fused SGD cannot take parameters whose momentum begins later than that of the others
        return torch.optim.SGD(params, lr=lr, momentum=momentum, fused=None if momentum else fused)
    if name == "adagrad":
        return _place_state(torch.optim.Adagrad(params, lr=lr, eps=eps), device)
    if lr < _SMALL_FOR_ADAFACTOR:
        say(f"adafactor's learning rate is relative to the size of each weight: {lr:g} trains slowly, 1e-2 is usual")
    return torch.optim.Adafactor(params, lr=lr)


def _check(name: str, settings: dict[str, Any], lr: float) -> None:
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"train.optimizer={name!r} is not known{meant}", f"one of {', '.join(OPTIMIZERS)}")
    for key, value in settings.items():
        if key not in _USES[name] and value != _DEFAULTS[key]:
            users = [other for other in OPTIMIZERS if key in _USES[other]]
            raise RecipeError(
                f"train.{key}={value!r} has no effect on {name}",
                f"leave train.{key} out, or train.optimizer: {' or '.join(users)}",
            )
    if not 0.0 <= lr < float("inf"):
        raise RecipeError(f"train.lr={lr!r} is not possible", "a number from 0 up, for example 5e-5")
    if not all(0.0 <= beta < 1.0 for beta in settings["betas"]) or len(settings["betas"]) != 2:
        raise RecipeError(f"train.betas={settings['betas']} is not possible", "two numbers from 0 to below 1")
    for key in ("eps", "momentum"):
        if not 0.0 <= settings[key] < float("inf"):
            raise RecipeError(f"train.{key}={settings[key]!r} is not possible", "a number from 0 up")


def _place_state(optimizer: torch.optim.Optimizer, device: torch.device) -> torch.optim.Optimizer:
    """Adagrad makes its sums at once, beside parameters that may not have been moved to the device yet."""
    for state in optimizer.state.values():
        state["sum"] = state["sum"].to(device)
    return optimizer
