"""Build a transformers model from clustered weights: decoded once, or module by module in each forward."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.compress.clustered_file import read_weights
from trimtab.compress.clustered_modules import ClusteredEmbedding, ClusteredLinear
from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.errors import ModelError, RecipeError
from trimtab.model.hub import quiet_transformers
from trimtab.model.limits import check_sizes
from trimtab.model.load import auto_class, load_config

DECODE = ("once", "on-use")


def load_clustered_model(
    folder: str | Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    decode: str = "once",
    trust_remote_code: bool = False,
) -> Any:
    """Load a clustered model in eval mode on the CPU.

    Args:
        folder: The folder.
        kind: Kind of the model, as in `load_model`.
        dtype: dtype of all weights, decoded or not.
        decode: "once" decodes every weight now, for a plain and fast model. "on-use" keeps indices and palettes and
            decodes a weight in each forward pass: this needs less memory, and is slower except for products of few rows
            on a GPU.
        trust_remote_code: Whether Python code in the folder may run.
    """
    if decode not in DECODE:
        raise RecipeError(f"decode={decode!r} is not valid", f"use one of {', '.join(DECODE)}")
    config = load_config(str(folder), trust_remote_code=trust_remote_code)
    check_sizes(str(folder), config, Path(folder))
    with quiet_transformers(), _parameters_on_meta():
        model = auto_class(kind).from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    fill(model, read_weights(folder), str(folder), dtype=dtype, on_use=decode == "on-use")
    _read_generation_config(model, Path(folder))
    return model.eval()


def fill(
    model: Any,
    weights: Iterator[tuple[str, ClusteredWeight | Tensor]],
    source: str,
    *,
    dtype: torch.dtype,
    on_use: bool,
) -> None:
    """Put weights into a model whose parameters are on the meta device; shared parameters stay shared.

    Raises:
        ModelError: If a weight is missing, unknown, or of another shape.
    """
    holders = _holders(model)
    buffers = dict(model.named_buffers())
    for name, weight in weights:
        if name in buffers and isinstance(weight, Tensor):
            if buffers[name].shape != weight.shape:
                raise ModelError(f"{source}: {name} is {list(weight.shape)}, not {list(buffers[name].shape)}", _CURE)
            buffers[name].copy_(weight)
            continue
        if name not in holders:
            raise ModelError(f"{source} contains {name}, which its model does not have", _CURE)
        _put(model, holders.pop(name), name, weight, source, dtype if on_use else None, dtype)
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ModelError(f"{source} has no weights for {', '.join(missing[:2])}", _CURE)


_CURE = "its files do not match each other: cluster or download the model again"


def _put(
    model: Any,
    places: list[tuple[str, str]],
    name: str,
    weight: ClusteredWeight | Tensor,
    source: str,
    on_use_dtype: torch.dtype | None,
    dtype: torch.dtype,
) -> None:
    """Put a weight into all modules that share it."""
    old = model.get_parameter(name)
    shape = tuple(weight.shape)
    if isinstance(weight, ClusteredWeight) and weight.transposed:
        shape = shape[::-1]
    if tuple(old.shape) != shape:
        raise ModelError(f"{source}: {name} is {list(shape)}, not {list(old.shape)} as in its config.json", _CURE)
    can_replace = all(_is_replaceable(model.get_submodule(path)) for path, _ in places)
    if isinstance(weight, ClusteredWeight) and on_use_dtype is not None and can_replace:
        replace_modules(model, [path for path, _ in places], weight, on_use_dtype)
        return
    value = weight.decoded(dtype) if isinstance(weight, ClusteredWeight) else weight
    if value.is_floating_point():
        value = value.to(dtype)
    parameter = nn.Parameter(value, requires_grad=value.is_floating_point())
    for path, key in places:
        model.get_submodule(path)._parameters[key] = parameter


def _is_replaceable(module: nn.Module) -> bool:
    """Whether a clustered module computes the same as this one; subclasses may have a different forward."""
    from transformers.pytorch_utils import Conv1D

    return type(module) in (nn.Linear, nn.Embedding, Conv1D)


def replace_modules(model: Any, paths: list[str], weight: ClusteredWeight, dtype: torch.dtype) -> None:
    """Replace modules that share a weight by clustered ones that share indices and palettes."""
    first: ClusteredEmbedding | ClusteredLinear | None = None
    for path in paths:
        module = model.get_submodule(path)
        new: ClusteredEmbedding | ClusteredLinear
        if isinstance(module, nn.Embedding):
            new = ClusteredEmbedding(weight, dtype)
        else:
            new = ClusteredLinear(weight, module.bias, dtype)
        if first is None:
            first = new
        else:
            new.palettes, new.indices, new.scales = first.palettes, first.indices, first.scales
        model.set_submodule(path, new.train(module.training))


def _holders(model: nn.Module) -> dict[str, list[tuple[str, str]]]:
    """Return the modules that hold each parameter, as (module, attribute), by its first name."""
    places: dict[int, list[tuple[str, str]]] = {}
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((path, key))
                names.setdefault(id(parameter), f"{path}.{key}" if path else key)
    return {names[key]: found for key, found in places.items()}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Create parameters without memory. Buffers, which files need not contain, get their values."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.data.to("meta"), requires_grad=parameter.requires_grad)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def _read_generation_config(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file() and getattr(model, "generation_config", None) is not None:
        model.generation_config = GenerationConfig.from_pretrained(folder)


def clustered_weights(model: nn.Module) -> Mapping[str, ClusteredWeight]:
    """Return the current clustered weights of a model that decodes on use, by name; shared ones by their first name."""
    found: dict[str, ClusteredWeight] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        if isinstance(module, ClusteredLinear | ClusteredEmbedding) and id(module.palettes) not in seen:
            seen.add(id(module.palettes))
            found[f"{path}.weight"] = module.clustered
    return found
