"""Which modules of a model get an adapter, and which are kept trainable in full: from patterns to names of modules."""

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.blocks import blocks_of
from trimtab.model.load import newly_initialised
from trimtab.model.nf4 import base_parts, num_weights

ALL_LINEAR = "all-linear"
_WORTH_SAYING = 0.01  # share of the weights from which on it is said that they get no adapter


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a product with a weight that an adapter can be added to."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, torch.nn.Linear | Conv1D)  # bitsandbytes' Linear4bit is a torch Linear


def select_targets(
    model: Any, patterns: str | Sequence[str], layers: tuple[int, int] | None, kept: Sequence[str]
) -> dict[str, torch.nn.Module]:
    """The linear modules that get an adapter, by name, in the model's order.

    Args:
        model: A transformers model.
        patterns: "all-linear" (every linear module of the base, no head), or globs on the names of modules.
        layers: First and last of the model's blocks that are meant, both inclusive; negative from the end.
        kept: Names of modules that train in full; what is in them gets no adapter.

    Raises:
        RecipeError: If a pattern or the range of layers matches nothing.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not output and not _inside(name, kept)
    }
    if patterns == ALL_LINEAR:
        base = {id(module) for part in base_parts(model) for module in part.modules()}
        chosen = {name: module for name, module in linear.items() if id(module) in base}
        if not chosen:
            raise RecipeError(
                f"adapter.targets: all-linear finds no linear module in {type(model).__name__}",
                f"name modules: {_some_names(model)}",
            )
        _say_what_is_left_out(model, chosen, kept)
    else:
        several = [patterns] if isinstance(patterns, str) else list(patterns)
        names = {name for pattern in several for name in _linear_of(model, pattern, linear, kept)}
        chosen = {name: module for name, module in linear.items() if name in names}
    return chosen if layers is None else _in_layers(model, chosen, layers)


def select_kept(model: Any, patterns: Sequence[str]) -> list[str]:
    """Names of the modules that train in full: those that the patterns name, and what is newly initialised.

    Raises:
        RecipeError: If a pattern matches no module with parameters, or a module is stored in a form that cannot train.
    """
    from_patterns = [name for pattern in patterns for name in _modules_matching(model, pattern, "adapter.trains")]
    new = newly_initialised(model)
    holders = {name.rpartition(".")[0] for name in new}
    for name in holders:
        if any(name == outer or name.startswith(f"{outer}.") for outer in from_patterns):
            continue
        own = {f"{name}.{inner}".removeprefix(".") for inner, _ in model.get_submodule(name).named_parameters()}
        if not own <= new:
            raise RecipeError(
                f"{sorted(new & own)[0]} is newly initialised and has to train, but the rest of {name or 'the model'} "
                "is not: an adapter holds whole modules",
                f"keep all of it trainable: adapter.trains: [{name}]" if name else "train without an adapter",
            )
    kept = _outermost([*from_patterns, *_grown(model, holders, new)])
    for name, module in _named(model, kept):
        for inner, parameter in module.named_parameters():
            if not parameter.is_floating_point():
                where = f"{name}.{inner}"
                raise RecipeError(f"adapter.trains: {where} is in 4 bits and cannot train in full", "leave it out")
    return kept


def match_values(names: Sequence[str], values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The value of each name that a pattern matches; the later pattern wins."""
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise _no_match(pattern, names, key, "module that has an adapter")
        found |= dict.fromkeys(matched, value)
    return found


def shortened(names: Sequence[str], model: torch.nn.Module) -> list[str]:
    """The same modules in the form that PEFT stores: the last part of a name wherever it means these modules only."""
    chosen = set(names)
    by_last: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        by_last.setdefault(name.rpartition(".")[2], set()).add(name)
    short: dict[str, None] = {}
    for name in names:
        last = name.rpartition(".")[2]
        short[last if by_last[last] <= chosen and not last.isdigit() else name] = None
    return list(short)


def _linear_of(model: Any, pattern: str, linear: Mapping[str, torch.nn.Module], kept: Sequence[str]) -> Iterator[str]:
    """What one pattern means: linear modules, and those inside of other modules that it names."""
    named = _modules_matching(model, pattern, "adapter.targets")
    found = [name for name in linear if name in named or _inside(name, named)]
    if not found:
        name = named[0]
        if _inside(name, kept):
            raise RecipeError(f"adapter.targets: {pattern!r} is {name}, which trains in full", "name it once")
        if model.get_submodule(name) is model.get_output_embeddings():
            raise RecipeError(
                f"adapter.targets: {name} makes the model's output and takes no adapter",
                f"train it in full: adapter.trains: [{name}]",
            )
        kind = type(model.get_submodule(name)).__name__
        raise RecipeError(
            f"adapter.targets: {pattern!r} is {name}, a {kind} without linear modules",
            "name linear modules, or all-linear",
        )
    yield from found


def _in_layers(model: Any, chosen: dict[str, torch.nn.Module], layers: tuple[int, int]) -> dict[str, torch.nn.Module]:
    blocks = [name for name, _ in blocks_of(model)]
    first, last = (index + len(blocks) if index < 0 else index for index in layers)
    if not 0 <= first <= last < len(blocks):
        raise RecipeError(
            f"adapter.layers: {list(layers)} is no range of the {len(blocks)} layers of {type(model).__name__}",
            f"give the first and the last, for example [0, {len(blocks) - 1}]; negative ones count from the end",
        )
    meant = blocks[first : last + 1]
    within = {name: module for name, module in chosen.items() if _inside(name, meant)}
    if not within:
        raise RecipeError(
            f"adapter.layers: no target lies in the layers {first} to {last}", "widen the range, or change the targets"
        )
    return within


def _say_what_is_left_out(model: Any, chosen: Mapping[str, torch.nn.Module], kept: Sequence[str]) -> None:
    """Weights that are matrices but no linear modules, such as the fused experts of a mixture, get no adapter."""
    from_base = {id(module) for part in base_parts(model) for module in part.modules()}
    left_out: dict[str, int] = {}
    for name, module in model.named_modules():
        if id(module) not in from_base or name in chosen or _inside(name, kept):
            continue
        if isinstance(module, torch.nn.Embedding) or is_linear(module):
            continue
        size = sum(p.numel() for p in module.parameters(recurse=False) if p.ndim > 1)
        if size:
            kind = type(module).__name__
            left_out[kind] = left_out.get(kind, 0) + size
    num_all = sum(num_weights(parameter) for parameter in model.parameters())
    if sum(left_out.values()) > _WORTH_SAYING * num_all:
        share = sum(left_out.values()) / num_all
        kinds = ", ".join(sorted(left_out, key=lambda kind: -left_out[kind])[:3])
        say(f"adapter: all-linear leaves out {share:.0%} of the weights, which are in no linear module ({kinds})")


def _modules_matching(model: Any, pattern: str, key: str) -> list[str]:
    # The head of a model with tied weights and the like may be one module under two names.
    names = [name for name, module in model.named_modules(remove_duplicate=False) if name and any(_tensors(module))]
    found = [name for name in names if _matches(name, pattern)]
    if not found:
        raise _no_match(pattern, names, key, f"module of {type(model).__name__}")
    return found


def _tensors(module: torch.nn.Module) -> Iterator[bool]:
    return (True for _ in module.parameters())


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _no_match(pattern: str, names: Sequence[str], key: str, what: str) -> RecipeError:
    known = {part for name in names for part in (name, name.rpartition(".")[2]) if not part.isdigit()}
    near = get_close_matches(pattern, sorted(known), n=3, cutoff=0.5)
    some = ", ".join(list(dict.fromkeys(name.rpartition(".")[2] for name in names))[:12])
    return RecipeError(
        f"{key}: {pattern!r} matches no {what}",
        f"did you mean {' or '.join(near)}?" if near else f"there are {some}",
    )


def _grown(model: Any, holders: set[str], new: frozenset[str]) -> list[str]:
    """The outermost modules of which everything is new: a whole head, and not its two layers."""
    grown = []
    for name in holders:
        while "." in name:
            outer = name.rpartition(".")[0]
            if not all(f"{outer}.{inner}" in new for inner, _ in model.get_submodule(outer).named_parameters()):
                break
            name = outer
        grown.append(name)
    return grown


def _outermost(names: Sequence[str]) -> list[str]:
    unique = sorted(dict.fromkeys(names))
    return [name for name in unique if not any(_inside(name, [other]) for other in unique if other != name)]


def _inside(name: str, outer: Sequence[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in outer)


def _named(model: torch.nn.Module, names: Sequence[str]) -> list[tuple[str, torch.nn.Module]]:
    return [(name, model.get_submodule(name)) for name in names]


def _some_names(model: torch.nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name and name.count(".") < 2]
    return ", ".join(names[:12])
