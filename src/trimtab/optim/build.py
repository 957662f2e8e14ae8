"""Optimizers by name, in the fastest form that the device has. A setting that the optimizer does not use is refused."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.log import say, say_once
from trimtab.optim.adagrad import Adagrad
from trimtab.optim.quantized import Adagrad8bit, Adam8bit, AdamW8bit, Quantized
from trimtab.optim.stochastic_rounding import (
    RoundedAdagrad,
    RoundedAdam,
    RoundedAdamW,
    RoundedSGD,
    StochasticRounding,
    has_fused,
)

PAGED = "paged-"
QUANTIZED: dict[str, type[Quantized]] = {"adamw8bit": AdamW8bit, "adam8bit": Adam8bit, "adagrad8bit": Adagrad8bit}
OPTIMIZERS = (
    *("adamw", "adam", "adagrad", "sgd", "adafactor"),
    *QUANTIZED,
    *(PAGED + name for name in QUANTIZED),
)

# Fused steps update every parameter in one pass and make no temporary copies. torch has them for these devices.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0}
_USES = {"adamw": {"betas", "eps"}, "adam": {"betas", "eps"}, "adagrad": {"eps"}, "sgd": {"momentum"}}
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
    rounds_stochastically: bool = False,
    rounding_seed: int = 0,
) -> torch.optim.Optimizer:
    """Make an optimizer.

    Args:
        name: One of `OPTIMIZERS`. Those with 8bit in their name keep state of 8 bits, and those with paged before it
            keep it in memory that an NVIDIA driver moves to the host when the GPU is full.
        groups: Parameter groups, with their weight decay; see `trimtab.optim.groups.decay_groups`. The decay of adamw
            and adafactor acts on the weights, that of the others is added to the gradients.
        lr: Learning rate. For adafactor it is relative to the size of each weight, and 1e-2 is usual.
        betas: For adam and adamw.
        eps: For adam, adamw and adagrad.
        momentum: For sgd.
        device: Where the parameters will be when the optimizer steps.
        rounds_stochastically: Round bf16 weights (and bf16 state) up or down by chance, so that small updates count.
        rounding_seed: What that chance follows from; has to be the same in all processes that share a model.

    Returns:
        An optimizer of torch, or one that behaves as such.
    """
    device = torch.device(device)
    _check(name, {"betas": tuple(betas), "eps": eps, "momentum": momentum}, lr)
    kind = name.removeprefix(PAGED)
    if kind in QUANTIZED:
        return _build_quantized(name, groups, lr, betas, eps, device, rounds_stochastically, rounding_seed)
    fused = fused_form(name, device, momentum)
    params: Any = list(groups)
    if rounds_stochastically:
        if name == "adamw":
            return RoundedAdamW(params, lr=lr, betas=betas, eps=eps, fused=fused, rounding_seed=rounding_seed)
        if name == "adam":
            return RoundedAdam(params, lr=lr, betas=betas, eps=eps, fused=fused, rounding_seed=rounding_seed)
        if name == "sgd":
            return RoundedSGD(params, lr=lr, momentum=momentum, fused=fused, rounding_seed=rounding_seed)
        if name == "adagrad":
            return RoundedAdagrad(params, lr=lr, eps=eps, fused=fused, rounding_seed=rounding_seed)
        raise RecipeError(
            f"{name} cannot round stochastically, and bf16 weights need it: small updates would be lost",
            "train.optimizer: adamw, or train.precision: bf16",
        )
    if name == "adamw":
        return torch.optim.AdamW(params, lr=lr, betas=betas, eps=eps, weight_decay=0.0, fused=fused)
    if name == "adam":
        return torch.optim.Adam(params, lr=lr, betas=betas, eps=eps, fused=fused)
    if name == "sgd":
        return torch.optim.SGD(params, lr=lr, momentum=momentum, fused=fused)
    if name == "adagrad":
        return Adagrad(params, lr=lr, eps=eps, fused=fused)
    if lr < _SMALL_FOR_ADAFACTOR:
        say(f"adafactor's learning rate is relative to the size of each weight: {lr:g} trains slowly, 1e-2 is usual")
    return torch.optim.Adafactor(params, lr=lr)


def rounds_stochastically(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer rounds bf16 weights by chance."""
    by_choice = isinstance(optimizer, Quantized) and optimizer.rounds_stochastically
    return by_choice or isinstance(optimizer, StochasticRounding)


def fused_form(name: str, device: torch.device, momentum: float = 0.0) -> bool | None:
    """Whether steps of an optimizer of torch are fused; None lets torch take foreach where the device has it."""
    if name == "adagrad":
        # torch has a kernel for CUDA and refuses it
        return (device.type != "cuda" and has_fused("_fused_adagrad_", device)) or None
    if name == "sgd" and momentum:
        return None  # torch's fused SGD cannot take parameters whose momentum begins later than that of the others
    return True if device.type in _FUSED_DEVICES else None


def _build_quantized(
    name: str,
    groups: Sequence[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    device: torch.device,
    rounds_stochastically: bool,
    rounding_seed: int,
) -> torch.optim.Optimizer:
    require_extra("bitsandbytes", f"train.optimizer: {name}")
    is_paged = name.startswith(PAGED)
    if is_paged and device.type != "cuda":
        say_once(f"{name}: paging needs an NVIDIA GPU; the state stays where it is")
    return QUANTIZED[name.removeprefix(PAGED)](
        list(groups),
        lr=lr,
        betas=betas,
        eps=eps,
        is_paged=is_paged and device.type == "cuda",
        rounds_stochastically=rounds_stochastically,
        rounding_seed=rounding_seed,
    )


def _uses(name: str) -> set[str]:
    """The settings that an optimizer has beside its learning rate; more compact state changes none of them."""
    return _USES.get(name.removeprefix(PAGED).removesuffix("8bit"), set())


def _check(name: str, settings: dict[str, Any], lr: float) -> None:
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"train.optimizer={name!r} is not known{meant}", f"one of {', '.join(OPTIMIZERS)}")
    for key, value in settings.items():
        if key not in _uses(name) and value != _DEFAULTS[key]:
            users = [other for other in OPTIMIZERS if key in _uses(other)]
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
