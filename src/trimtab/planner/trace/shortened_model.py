"""Copy a model without some of its repeated blocks, for tracing."""

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.model.blocks import stacks_of
from trimtab.planner.trace.blocks import Repeat, find_repeat


@dataclass(frozen=True)
class Shortened:
    """A copy of a model without some blocks.

    Attributes:
        model: The copy.
        repeats: The unit to repeat, for every shortened stack.
        kept: Numbers of the remaining blocks in the whole model, counted over all stacks.
    """

    model: Any
    repeats: dict[int, Repeat] = field(default_factory=dict)
    kept: tuple[int, ...] = ()


def shorten(
    whole: Any, mark: Callable[[int], Any] = lambda _: None, *, allowed: bool = True, reaches_far: bool = True
) -> Shortened:
    """Copy a model without the blocks that equal their neighbours.

    Args:
        whole: A model on meta; it is not changed.
        mark: Returns a value for the number of a block, counted over all stacks; blocks with different values are not
            interchangeable.
        allowed: False copies the whole model.
        reaches_far: Whether the computation of a block may depend on others up to a period away. Blocks of more than
            one kind, such as those that share keys, always may.
    """
    stacks = stacks_of(whole)
    repeats: dict[int, Repeat] = {}
    kept: list[int] = []
    short: list[list[int]] = []
    begin = 0
    for stack, (_, blocks) in enumerate(stacks):
        own = [_kind(whole, block, number) for number, block in enumerate(blocks)]
        kinds = [(kind, mark(begin + number)) for number, kind in enumerate(own)]
        found = find_repeat(kinds, reaches_far=reaches_far or len(set(own)) > 1) if allowed else None
        numbers = list(range(len(blocks))) if found is None else found[1]
        if found is not None:
            repeats[stack] = found[0]
        short.append(numbers)
        kept += [begin + number for number in numbers]
        begin += len(blocks)
    return Shortened(_copied(whole, stacks, short), repeats, tuple(kept))


def _kind(model: Any, block: torch.nn.Module, number: int) -> Any:
    """What interchangeable blocks must share: class, weight shapes, and per-layer settings of the config."""
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    config = getattr(model.config, "text_config", None) or model.config
    own = tuple(
        repr(values[number])  # such as the kind of each block, or which blocks have no positions
        for _, values in sorted(vars(config).items())
        if isinstance(values, list | tuple) and number < len(values)
        if len(values) == getattr(config, "num_hidden_layers", None)
    )
    return type(block).__name__, shapes, own, getattr(block, "attention_type", None)


def _copied(whole: Any, stacks: list[tuple[str, list[torch.nn.Module]]], kept: list[list[int]]) -> Any:
    """Copy the model with only these blocks; the other blocks are never copied."""
    homes = [whole.get_submodule(name) for name, _ in stacks]
    before = [dict(home._modules) for home in homes]
    try:
        for home, (_, blocks), numbers in zip(homes, stacks, kept, strict=True):
            home._modules.clear()
            home._modules.update({str(index): blocks[number] for index, number in enumerate(numbers)})
        model = copy.deepcopy(whole)
    finally:
        for home, modules in zip(homes, before, strict=True):
            home._modules.clear()
            home._modules.update(modules)
    if stacks:
        _fit_config(model, [len(blocks) for _, blocks in stacks], kept)
    return model


def _fit_config(model: Any, lengths: list[int], kept: list[list[int]]) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or getattr(config, "_trimtab_shortened", False):
            continue
        config._trimtab_shortened = True
        types = getattr(config, "layer_types", None)
        if types is not None and len(types) == lengths[0]:
            with contextlib.suppress(AttributeError):  # Mamba's blocks are all the same, and follow from their number
                config.layer_types = [types[number] for number in kept[0]]
        if getattr(config, "num_hidden_layers", None) == lengths[0]:
            with contextlib.suppress(
                NotImplementedError
            ):  # ProphetNet's number of layers is the sum of two settings, and is not read
                config.num_hidden_layers = len(kept[0])
    for index, numbers in enumerate(kept):
        for position, number in enumerate(numbers):
            block = stacks_of(model)[index][1][position]
            for module in block.modules():
                if getattr(module, "layer_idx", None) == number:
                    module.layer_idx = position  # type: ignore[assignment]
