"""Fused weights of experts: one parameter contains the matrices of all experts, and its module is not linear.

transformers stores the experts of nearly all models in this way. PEFT adapts such a parameter with two matrices per
expert (`target_parameters`): in each forward, the sum of the weight and the product is computed for all experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.model.quantization import base_parts


def fused_experts(model: Any) -> dict[str, torch.nn.Parameter]:
    """The fused expert weights of a base model by name; biases are not among them."""
    base = {id(module) for part in base_parts(model) for module in part.modules()}
    return {
        f"{name}.{last}": parameter
        for name, module in model.named_modules()
        if id(module) in base and isinstance(getattr(module, "num_experts", None), int)
        for last, parameter in module.named_parameters(recurse=False)
        if parameter.ndim == 3 and parameter.shape[0] == module.num_experts
    }


def shorten_parameter_names(names: Sequence[str], model: torch.nn.Module) -> list[str]:
    """Shorten parameter names to their last two parts, as in PEFT's examples, if that matches only these."""
    chosen = set(names)
    by_end: dict[str, set[str]] = {}
    for name, _ in model.named_parameters():
        by_end.setdefault(_last_two(name), set()).add(name)
    return list(dict.fromkeys(_last_two(name) if by_end[_last_two(name)] <= chosen else name for name in names))


def _last_two(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def adapted_names(layers: Mapping[str, Any]) -> set[str]:
    """The names of what PEFT's modules adapt: linear modules, and single parameters.

    Args:
        layers: PEFT's modules by name. Those of several parameters of one module are nested.
    """
    return {_adapted_name(name, layer) for name, layer in layers.items()}


def _adapted_name(name: str, layer: Any) -> str:
    parameter = getattr(layer, "parameter_name", None)
    if parameter is None:
        return name
    while name.endswith(".base_layer"):
        name = name.removesuffix(".base_layer")
    return f"{name}.{parameter}"


def adapted_parameter(layer: Any) -> torch.nn.Parameter:
    """The parameter of the base that one of PEFT's modules adapts."""
    parameter: torch.nn.Parameter = getattr(layer.get_base_layer(), getattr(layer, "parameter_name", "weight"))
    return parameter


def refuse_settings(dropout: float, dora: bool, init: str | None) -> None:
    """Refuse adapter settings that low-rank matrices of experts do not support.

    Args:
        dropout: Dropout on the adapter's input.
        dora: Whether norms of rows are trained separately.
        init: What the initial matrices are taken from; None if the product starts as zero.

    Raises:
        RecipeError: PEFT does not support them: it computes the sum of weight and product, and never sees the input.
    """
    found = {"dropout": dropout or None, "dora": dora or None, "init": init}
    for key, value in found.items():
        if value is not None:
            raise RecipeError(
                f"adapter.{key} is {value!r}, which adapters on fused experts do not support (adapter.experts: true)",
                f"leave adapter.{key} or adapter.experts out",
            )
