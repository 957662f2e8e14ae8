"""Fused norms and gated products from liger-kernel, which keep less for the backward pass and make fewer passes.

Only the modules of one model are changed: liger-kernel also replaces the classes of the model's family, for models that
are built later, and that is undone here.
"""

import sys
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.hardware.extras import has_package, require_extra


def choose_kernels(wanted: str, model: torch.nn.Module, device: torch.device, compute_dtype: torch.dtype | None) -> str:
    """What `auto` is here: liger where it is installed, knows the model, and the model computes in half precision.

    Args:
        wanted: "auto", "plain" or "liger".
        model: A transformers model.
        device: Where it computes.
        compute_dtype: In what format; None is fp32, which stays as transformers computes it.

    Raises:
        RecipeError: If "liger" was asked for and cannot be had.
    """
    if wanted != "auto":
        if wanted == "liger":
            _require_liger(model, device)
        return wanted
    usable = device.type == "cuda" and compute_dtype is not None and has_package("liger_kernel")
    return "liger" if usable and _family(model) in _families() else "plain"


def use_liger(model: torch.nn.Module) -> None:
    """Give the norms and gated products of a model the fused kernels; its loss and its classes stay as they are."""
    import inspect

    apply = _families()[_family(model)]
    home = sys.modules[type(model).__module__]
    before = dict(vars(home))
    wanted = {"rope": False, "cross_entropy": False, "fused_linear_cross_entropy": False}
    apply(model=model, **{name: value for name, value in wanted.items() if name in inspect.signature(apply).parameters})
    for name, value in vars(home).copy().items():
        if name in before and before[name] is not value:
            setattr(home, name, before[name])


def _family(model: torch.nn.Module) -> str:
    config: Any = model.config
    return str(config.model_type)


def _families() -> dict[str, Any]:
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    return dict(MODEL_TYPE_TO_APPLY_LIGER_FN)


def _require_liger(model: torch.nn.Module, device: torch.device) -> None:
    require_extra("liger_kernel", "memory.kernels: liger")
    if device.type != "cuda":
        raise RecipeError(f"memory.kernels: liger needs an NVIDIA GPU; this device is {device.type}", "plain, or auto")
    if _family(model) not in _families():
        raise RecipeError(f"memory.kernels: liger does not know models of the kind {_family(model)}", "plain, or auto")
