"""Remove layers from a model: embeddings, head and the chosen layers stay, and the config describes the result."""

import contextlib
import copy
from collections.abc import Sequence
from typing import Any

import torch

from trimtab.errors import ModelError, RecipeError
from trimtab.model.blocks import stacks_of
from trimtab.model.hub import quiet_transformers

_LAYER_NUMBERS = ("layer_idx", "layer_id", "layer_index")  # attributes of modules; key-value caches are found by them
_SIZES = {
    "encoder": ("encoder_layers", "num_layers", "num_encoder_layers"),
    "decoder": ("decoder_layers", "num_decoder_layers"),
}


def evenly_spaced(num_layers: int, num_kept: int) -> list[int]:
    """Numbers of the layers to keep, including the first and the last: [0, 2, 4, 7, 9, 11] for 6 of 12."""
    if num_kept == 1:
        return [0]
    return [round(index * (num_layers - 1) / (num_kept - 1)) for index in range(num_kept)]


def choose_layers(num_layers: int, asked: str | int | Sequence[int]) -> list[int]:
    """Numbers of the layers that a setting keeps.

    Args:
        num_layers: Number of layers of the model.
        asked: "half", a number of layers, or the layers themselves.

    Raises:
        RecipeError: The model has no such layers.
    """
    if not isinstance(asked, str | int):
        if max(asked) >= num_layers:
            cure = f"choose layers from 0 to {num_layers - 1}"
            raise RecipeError(f"distill.student: layer {max(asked)} does not exist: there are {num_layers}", cure)
        return list(asked)
    num_kept = max(1, num_layers // 2) if isinstance(asked, str) else asked
    if num_kept > num_layers:
        cure = f"a number up to {num_layers}"
        raise RecipeError(f"distill.student: {num_kept} layers cannot be cut out of {num_layers}", cure)
    return evenly_spaced(num_layers, num_kept)


def cut_layers(model: Any, asked: str | int | Sequence[int]) -> list[list[int]]:
    """Remove the other layers of a transformers model in place; the model may be on `meta`.

    Args:
        model: The model. An encoder-decoder is cut in both parts.
        asked: As in `choose_layers`.

    Returns:
        The layers that were kept, for each part.

    Raises:
        ModelError: The model has no list of layers, or its config cannot describe the rest.
        RecipeError: The model has no such layers.
    """
    stacks = stacks_of(model)
    if not stacks:
        raise _cannot_cut(model, "it has no list of layers")
    kept = [choose_layers(len(blocks), asked) for _, blocks in stacks]
    homes = [model.get_submodule(name) for name, _ in stacks]
    configs = _configs_of(model, homes)  # names relative to the whole model: a part is found by its contents
    for home, (_, blocks), numbers in zip(homes, stacks, kept, strict=True):
        home._modules.clear()
        for position, number in enumerate(numbers):
            home._modules[str(position)] = blocks[number]
            _renumber(blocks[number], number, position)
    for config, of in configs:
        _fit_config(config, [len(stacks[index][1]) for index in of], [kept[index] for index in of])
    _check(model)
    return kept


def _configs_of(model: Any, homes: list[Any]) -> list[tuple[Any, list[int]]]:
    """Every config in a model, with the numbers of the stacks in the outermost module that has it."""
    found: dict[int, tuple[Any, list[int]]] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and id(config) not in found:
            inside = {id(inner) for inner in module.modules()}
            found[id(config)] = (config, [index for index, home in enumerate(homes) if id(home) in inside])
    return [(config, of) for config, of in found.values() if of]


def _renumber(block: torch.nn.Module, before: int, now: int) -> None:
    for module in block.modules():
        for name in _LAYER_NUMBERS:
            if getattr(module, name, None) == before:
                setattr(module, name, now)


def _fit_config(config: Any, lengths: list[int], kept: list[list[int]]) -> None:
    if len(lengths) == 2:
        for part, length, numbers in zip(("encoder", "decoder"), lengths, kept, strict=True):
            for name in _SIZES[part]:
                if getattr(config, name, None) == length:
                    setattr(config, name, len(numbers))
            if hasattr(getattr(config, part, None), "num_hidden_layers"):
                _fit_config(getattr(config, part), [length], [numbers])
        return
    config = getattr(config, "text_config", None) or config
    for name in list(vars(config)):
        values = getattr(config, name, None)
        if isinstance(values, list) and len(values) == lengths[0]:  # such as the kind of attention of each layer
            with contextlib.suppress(AttributeError):
                setattr(config, name, [values[number] for number in kept[0]])
    if getattr(config, "num_hidden_layers", None) == lengths[0]:
        config.num_hidden_layers = len(kept[0])


def _check(model: Any) -> None:
    """Refuse a model that its own config does not describe, because it could not be loaded again."""
    with quiet_transformers(), torch.device("meta"):
        described = type(model)(copy.deepcopy(model.config))
    wanted, found = ({name for name, _ in each.named_parameters()} for each in (described, model))
    if wanted != found:
        odd = sorted(wanted ^ found)[0]
        raise _cannot_cut(model, f"its config cannot describe the model without these layers ({odd})")


def _cannot_cut(model: Any, why: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} cannot be cut: {why}",
        "keep the first layer too, or set `model` to a smaller model and remove distill.student",
    )
