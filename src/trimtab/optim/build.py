"""Build optimizers by name, with fused kernels if the device has them. Settings without effect are refused."""

import difflib
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.extras import require_extra
from trimtab.log import log_info_once, say
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

# Fused steps update all parameters in one pass without temporaries. torch has them for these devices.
_FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
_DEFAULTS: dict[str, Any] = {"betas": (0.9, 0.999), "eps": 1e-8, "momentum": 0.0}
_USES = {"adamw": {"betas", "eps"}, "adam": {"betas", "eps"}, "adagrad": {"eps"}, "sgd": {"momentum"}}
# torch's optimizer, and trimtab's version that rounds bf16 weights stochastically
_CLASSES: dict[str, tuple[Any, Any]] = {
    "adamw": (torch.optim.AdamW, RoundedAdamW),
    "adam": (torch.optim.Adam, RoundedAdam),
    "adagrad": (Adagrad, RoundedAdagrad),
    "sgd": (torch.optim.SGD, RoundedSGD),
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
    rounds_stochastically: bool = False,
    rounding_seed: int = 0,
) -> torch.optim.Optimizer:
    """Build an optimizer.

    Args:
        name: One of `OPTIMIZERS`. Those that end in 8bit keep 8-bit state; with the prefix paged- the state is in CUDA
            managed memory, which the driver moves to the host when the GPU is full.
        groups: Parameter groups with their weight decay; see `trimtab.optim.groups.decay_groups`. Weight decay is
            decoupled for adamw and adafactor and added to the gradients by the others.
        lr: Learning rate. For adafactor it is relative to the size of each weight; 1e-2 is common.
        betas: For adam and adamw.
        eps: For adam, adamw and adagrad.
        momentum: For sgd.
        device: Device of the parameters when the optimizer steps.
        rounds_stochastically: Whether to round bf16 weights and bf16 state stochastically, so that small updates are
            not lost.
        rounding_seed: Seed of the stochastic rounding; must be the same in all processes that share a model.
    """
    device = torch.device(device)
    settings = {"betas": tuple(betas), "eps": eps, "momentum": momentum}
    options: dict[str, Any]
    _check(name, settings, lr)
    if (kind := name.removeprefix(PAGED)) in QUANTIZED:
        require_extra("bitsandbytes", f"train.optimizer: {name}")
        options = {"lr": lr, "betas": betas, "eps": eps, "is_paged": _is_paged(name, device)}
        options |= {"rounds_stochastically": rounds_stochastically, "rounding_seed": rounding_seed}
        return QUANTIZED[kind](list(groups), **options)
    if name in _CLASSES:
        options = {"lr": lr, **{key: value for key, value in settings.items() if key in _USES[name]}}
        options |= {"weight_decay": 0.0, "fused": fused_form(name, device, momentum)}
        options |= {"rounding_seed": rounding_seed} if rounds_stochastically else {}
        built: torch.optim.Optimizer = _CLASSES[name][rounds_stochastically](list(groups), **options)
        return built
    if rounds_stochastically:
        raise RecipeError(
            f"{name} cannot round stochastically, and without it small updates of bf16 weights are lost",
            "train.optimizer: adamw, or train.precision: bf16",
        )
    if lr < _SMALL_FOR_ADAFACTOR:
        say(f"adafactor's learning rate is relative to the size of each weight: {lr:g} trains slowly, 1e-2 is common")
    return torch.optim.Adafactor(list(groups), lr=lr)


def rounds_stochastically(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer rounds bf16 weights stochastically."""
    is_enabled = isinstance(optimizer, Quantized) and optimizer.rounds_stochastically
    return is_enabled or isinstance(optimizer, StochasticRounding)


def fused_form(name: str, device: torch.device, momentum: float = 0.0) -> bool | None:
    """The argument `fused` for a torch optimizer; None lets torch use foreach if the device supports it."""
    if name == "adagrad":
        # torch has a fused CUDA kernel, but its Adagrad refuses fused=True on CUDA
        return (device.type != "cuda" and has_fused("_fused_adagrad_", device)) or None
    if name == "sgd" and momentum:
        return None  # torch's fused SGD fails if only some parameters of a group have a momentum buffer
    return True if device.type in _FUSED_DEVICES else None


def _is_paged(name: str, device: torch.device) -> bool:
    """Whether an 8-bit optimizer pages its state: only with an NVIDIA GPU."""
    if name.startswith(PAGED) and device.type != "cuda":
        log_info_once(f"{name}: paging needs an NVIDIA GPU; the state is not paged")
    return name.startswith(PAGED) and device.type == "cuda"


def _uses(name: str) -> set[str]:
    """The settings, besides the learning rate, that affect an optimizer."""
    return _USES.get(name.removeprefix(PAGED).removesuffix("8bit"), set())


def _check(name: str, settings: dict[str, Any], lr: float) -> None:
    if name not in OPTIMIZERS:
        near = difflib.get_close_matches(name.lower(), OPTIMIZERS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"train.optimizer={name!r} is not valid{meant}", f"use one of {', '.join(OPTIMIZERS)}")
    for key, value in settings.items():
        if key not in _uses(name) and value != _DEFAULTS[key]:
            users = [other for other in OPTIMIZERS if key in _uses(other)]
            raise RecipeError(
                f"train.{key}={value!r} has no effect on {name}",
                f"leave train.{key} out, or train.optimizer: {' or '.join(users)}",
            )
    if not 0.0 <= lr < float("inf"):
        raise RecipeError(f"train.lr={lr!r} is not valid", "use a number of at least 0, such as 5e-5")
    if not all(0.0 <= beta < 1.0 for beta in settings["betas"]) or len(settings["betas"]) != 2:
        raise RecipeError(
            f"train.betas={settings['betas']} is not valid", "use two numbers, each at least 0 and less than 1"
        )
    for key in ("eps", "momentum"):
        if not 0.0 <= settings[key] < float("inf"):
            raise RecipeError(f"train.{key}={settings[key]!r} is not valid", "use a number of at least 0")
