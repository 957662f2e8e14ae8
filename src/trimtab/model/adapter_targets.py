"""Select the modules that get an adapter and the modules that are trained in full, from patterns on module names."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import torch

from trimtab.errors import RecipeError
from trimtab.log import say
from trimtab.model.blocks import blocks_of
from trimtab.model.direct_reads import directly_read
from trimtab.model.expert_weights import fused_experts
from trimtab.model.load import newly_initialized
from trimtab.model.quantization import base_parts, num_weights

ALL_LINEAR = "all-linear"
_LINEAR_SUBCLASSES = {"FalconLinear"}  # classes of transformers that compute the same as nn.Linear
Value = TypeVar("Value")
# For these types, PEFT refuses adapters on the output layer of Mamba blocks, whatever else has that name.
_MAMBA_TYPES = frozenset(("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"))
_MAMBA_OUTPUT = "out_proj"
_MIN_REPORTED_FRACTION = 0.01  # share of the weights without an adapter, below which they are not reported


def is_linear(module: torch.nn.Module) -> bool:
    """Whether a module is a linear layer that an adapter can be added to."""
    from transformers.pytorch_utils import Conv1D

    if not isinstance(module, torch.nn.Linear | Conv1D):  # bitsandbytes' Linear4bit is a subclass of Linear
        return False
    # Subclasses of transformers can compute anything: routers of some models return the experts of each token.
    kind = type(module)
    has_own_forward = isinstance(module, torch.nn.Linear) and kind.forward is not torch.nn.Linear.forward
    is_of_model = kind.__module__.startswith("transformers.models.")
    return not (has_own_forward and is_of_model) or kind.__name__ in _LINEAR_SUBCLASSES


def select_targets(
    model: Any,
    patterns: str | Sequence[str],
    layers: tuple[int, int] | None,
    kept: Sequence[str],
    experts: Sequence[str] = (),
) -> dict[str, torch.nn.Module]:
    """Select the linear modules that get an adapter, by name, in the model's order.

    Args:
        model: A transformers model.
        patterns: "all-linear" (every linear module of the base model, no head, none that PEFT refuses or whose weight
            is read directly), or globs on module names.
        layers: First and last transformer block to adapt, both inclusive; negative values count from the end.
        kept: Names of modules that are trained in full; modules inside them get no adapter.
        experts: Names of fused expert weights that also get an adapter.

    Raises:
        RecipeError: A pattern or the range of layers matches nothing, or only modules whose weight is read directly.
    """
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) and module is not output and not _inside(name, kept)
    }
    read = {name: reader for name, reader in directly_read(model).items() if name in linear}
    if patterns == ALL_LINEAR:
        base = {id(module) for part in base_parts(model) for module in part.modules()}
        refused = {name for name in linear if name in read or _is_refused_by_peft(model, name)}
        chosen = {name: linear[name] for name in linear if id(linear[name]) in base and name not in refused}
        _report_direct_reads([name for name in refused if id(linear[name]) in base], read)
        if not chosen:
            some = [name for name, _ in model.named_modules() if name and name.count(".") < 2][:12]
            raise RecipeError(
                f"adapter.targets: all-linear finds no linear module in {type(model).__name__}",
                f"choose modules: {', '.join(some)}",
            )
        _report_left_out(model, base, [*chosen, *kept], experts)
    else:
        several = [patterns] if isinstance(patterns, str) else list(patterns)
        names = {name for pattern in several for name in _adaptable(model, pattern, linear, kept, read)}
        chosen = {name: module for name, module in linear.items() if name in names}
    return chosen if layers is None else _in_layers(model, chosen, layers)


def select_experts(model: Any, layers: tuple[int, int] | None, kept: Sequence[str]) -> list[str]:
    """Names of the fused expert weights that get an adapter.

    Args:
        model: A transformers model.
        layers: First and last transformer block to adapt, as in `select_targets`.
        kept: Names of modules that are trained in full; weights inside them get no adapter.

    Raises:
        RecipeError: The model has no fused expert weights.
    """
    found = {name: parameter for name, parameter in fused_experts(model).items() if not _inside(name, kept)}
    if not found:
        raise RecipeError(
            f"adapter.experts: {type(model).__name__} has no fused expert weights to adapt",
            "leave adapter.experts out; adapter.targets: all-linear adapts experts that are linear modules",
        )
    return list(found if layers is None else _in_layers(model, found, layers))


def select_full_modules(model: Any, patterns: Sequence[str]) -> list[str]:
    """Select the modules that are trained in full: those that match the patterns, and newly initialized ones.

    Raises:
        RecipeError: A pattern matches no module with parameters, or a module is quantized and cannot be trained.
    """
    from_patterns = [name for pattern in patterns for name in _modules_matching(model, pattern, "adapter.trains")]
    new = newly_initialized(model)
    holders = {name.rpartition(".")[0] for name in new}
    for name in holders:
        if _inside(name, from_patterns):
            continue
        own = {f"{name}.{inner}".removeprefix(".") for inner, _ in model.get_submodule(name).named_parameters()}
        if not own <= new:
            raise RecipeError(
                f"{sorted(new & own)[0]} is newly initialized and must be trained, but the rest of "
                f"{name or 'the model'} is not, and an adapter can only contain whole modules",
                f"train the whole module: adapter.trains: [{name}]" if name else "train without an adapter",
            )
    kept = _outermost([*from_patterns, *_widest_new_modules(model, holders, new)])
    for name in kept:
        for inner, parameter in model.get_submodule(name).named_parameters():
            if not parameter.is_floating_point():
                raise RecipeError(
                    f"adapter.trains: {name}.{inner} is quantized and cannot be trained in full", f"remove {name}"
                )
    return kept


def select_scaled_modules(
    model: Any, patterns: str | Sequence[str] | None, layers: tuple[int, int] | None, kept: Sequence[str]
) -> dict[str, torch.nn.Module]:
    """Select the linear modules whose outputs or inputs IA3 scales; arguments as for `select_targets`.

    Without patterns these are the modules that PEFT chooses for the type of the model.

    Raises:
        RecipeError: PEFT does not know the type of the model, or a pattern matches nothing.
    """
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING as KNOWN_TARGETS  # noqa: N811

    if patterns is not None:
        return select_targets(model, patterns, layers, kept)
    kind = str(model.config.model_type)
    if kind not in KNOWN_TARGETS:
        raise RecipeError(
            f"adapter.targets: PEFT does not know which modules of {kind} models IA3 scales",
            "list the keys, the values and the second layer of the MLP, such as [k_proj, v_proj, down_proj]",
        )
    linear = select_targets(model, ALL_LINEAR, layers, kept)
    return {name: module for name, module in linear.items() if _ends_with(name, KNOWN_TARGETS[kind])}


def select_scaled_inputs(model: Any, targets: Sequence[str]) -> list[str]:
    """Select the IA3 modules whose inputs are scaled: second layers of MLPs; other modules have scaled outputs."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING as KNOWN_INPUTS  # noqa: N811

    endings = KNOWN_INPUTS.get(str(model.config.model_type))
    if endings is not None:
        return [name for name in targets if _ends_with(name, endings)]
    return [name for name in targets if _narrows(model.get_submodule(name))]


def _report_direct_reads(names: Sequence[str], read: Mapping[str, str]) -> None:
    """Log which linear modules get no adapter because something else computes with their weights."""
    if names:
        last = sorted({name.rpartition(".")[2] for name in names})
        readers = sorted({read[name] for name in names if name in read}) or ["Mamba kernels"]
        why = f"{', '.join(readers)} may read the weight directly and bypass an adapter"
        say(f"no adapter on {', '.join(last)}: {why}")


def _adaptable(
    model: Any, pattern: str, linear: Mapping[str, torch.nn.Module], kept: Sequence[str], read: Mapping[str, str]
) -> list[str]:
    """The linear modules that a pattern names, without those whose weight is read directly."""
    found = _linear_of(model, pattern, linear, kept)
    past = [name for name in found if name in read]
    if past and len(past) == len(found):
        raise RecipeError(
            f"adapter.targets: {pattern!r} matches {past[0]}, whose weight {read[past[0]]} reads directly: an adapter "
            "would have no effect",
            f"remove {pattern!r}, or train the module in full: adapter.trains: [{pattern!r}]",
        )
    _report_direct_reads(past, read)
    return [name for name in found if name not in read]


def _is_refused_by_peft(model: Any, name: str) -> bool:
    """Whether PEFT refuses an adapter on a linear module, because Mamba's kernels take an argument with that name."""
    kind = getattr(model.config, "model_type", None)
    return kind in _MAMBA_TYPES and name.rpartition(".")[2] == _MAMBA_OUTPUT


def _ends_with(name: str, endings: Sequence[str]) -> bool:
    """Whether a module name ends with one of these, as PEFT matches them."""
    return any(name == ending or name.endswith(f".{ending}") for ending in endings)


def _narrows(module: Any) -> bool:
    """Whether a linear module has fewer outputs than inputs."""
    num_out, num_in = module.weight.shape if isinstance(module, torch.nn.Linear) else reversed(module.weight.shape)
    return bool(num_out < num_in)


def match_values(names: Sequence[str], values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Map each module name that matches a pattern to the value of the last such pattern."""
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        matched = [name for name in names if _matches(name, pattern)]
        if not matched:
            raise _no_match(pattern, names, key, "module that has an adapter")
        found |= dict.fromkeys(matched, value)
    return found


def shorten_names(names: Sequence[str], model: torch.nn.Module) -> list[str]:
    """Shorten module names to their last part, as PEFT stores them, if that matches only the given modules."""
    chosen = set(names)
    by_last: dict[str, set[str]] = {}
    for name, _ in model.named_modules():
        by_last.setdefault(name.rpartition(".")[2], set()).add(name)
    short: dict[str, None] = {}
    for name in names:
        last = name.rpartition(".")[2]
        short[last if by_last[last] <= chosen and not last.isdigit() else name] = None
    return list(short)


def _linear_of(model: Any, pattern: str, linear: Mapping[str, torch.nn.Module], kept: Sequence[str]) -> list[str]:
    """The linear modules that match a pattern or are inside a module that matches it."""
    named = _modules_matching(model, pattern, "adapter.targets")
    found = [name for name in linear if _inside(name, named)]
    if found:
        return found
    name = named[0]
    module = model.get_submodule(name)
    if _inside(name, kept):
        raise RecipeError(
            f"adapter.targets: {pattern!r} matches {name}, which is trained in full",
            "list it either in adapter.targets or in adapter.trains",
        )
    if module is model.get_output_embeddings():
        raise RecipeError(
            f"adapter.targets: {name} is the output layer, which takes no adapter",
            f"train it in full: adapter.trains: [{name}]",
        )
    raise RecipeError(
        f"adapter.targets: {pattern!r} matches {name}, a {type(module).__name__} without linear modules",
        "choose linear modules, or all-linear",
    )


def _in_layers(model: Any, chosen: Mapping[str, Value], layers: tuple[int, int]) -> dict[str, Value]:
    blocks = [name for name, _ in blocks_of(model)]
    first, last = (index + len(blocks) if index < 0 else index for index in layers)
    if not 0 <= first <= last < len(blocks):
        raise RecipeError(
            f"adapter.layers: {list(layers)} is not a range of the {len(blocks)} layers of {type(model).__name__}",
            f"set the first and the last, for example [0, {len(blocks) - 1}]; negative ones count from the end",
        )
    within = {name: module for name, module in chosen.items() if _inside(name, blocks[first : last + 1])}
    if not within:
        raise RecipeError(
            f"adapter.layers: no target is in layers {first} to {last}", "widen the range, or change adapter.targets"
        )
    return within


def _report_left_out(model: Any, base: set[int], adapted: Sequence[str], experts: Sequence[str]) -> None:
    """Log how many weights are matrices but not linear modules, such as fused experts, and so get no adapter."""
    left_out: dict[str, int] = {}
    for name, module in model.named_modules():
        if id(module) not in base or _inside(name, adapted):
            continue
        if isinstance(module, torch.nn.Embedding) or is_linear(module):
            continue
        own = module.named_parameters(prefix=name, recurse=False)
        size = sum(p.numel() for parameter, p in own if p.ndim > 1 and parameter not in experts)
        if size:
            kind = type(module).__name__
            left_out[kind] = left_out.get(kind, 0) + size
    fraction = sum(left_out.values()) / sum(num_weights(parameter) for parameter in model.parameters())
    if fraction > _MIN_REPORTED_FRACTION:
        kinds = ", ".join(sorted(left_out, key=lambda kind: -left_out[kind])[:3])
        cure = "; LoRA adapts experts with adapter.experts: true" if fused_experts(model) and not experts else ""
        which = f"which are in no linear module ({kinds}){cure}"
        say(f"adapter: all-linear leaves out {fraction:.0%} of the weights, {which}")


def _modules_matching(model: Any, pattern: str, key: str) -> list[str]:
    # with duplicates: a tied head, for example, can be one module under two names
    modules = model.named_modules(remove_duplicate=False)
    names = [name for name, module in modules if name and next(module.parameters(), None) is not None]
    found = [name for name in names if _matches(name, pattern)]
    if not found:
        raise _no_match(pattern, names, key, f"module of {type(model).__name__}")
    return found


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition(".")[2], pattern)


def _no_match(pattern: str, names: Sequence[str], key: str, what: str) -> RecipeError:
    known = {part for name in names for part in (name, name.rpartition(".")[2]) if not part.isdigit()}
    near = get_close_matches(pattern, sorted(known), n=3, cutoff=0.5)
    ends = dict.fromkeys(name.rpartition(".")[2] for name in names)
    some = ", ".join([name for name in ends if not name.isdigit()][:12])
    return RecipeError(
        f"{key}: {pattern!r} matches no {what}",
        f"did you mean {' or '.join(near)}?" if near else f"there are {some}",
    )


def _widest_new_modules(model: Any, holders: set[str], new: frozenset[str]) -> list[str]:
    """The outermost modules around `holders` whose parameters are all new: a whole head instead of its two layers."""
    widest = []
    for name in holders:
        while "." in name:
            outer = name.rpartition(".")[0]
            if not all(f"{outer}.{inner}" in new for inner, _ in model.get_submodule(outer).named_parameters()):
                break
            name = outer
        widest.append(name)
    return widest


def _outermost(names: Sequence[str]) -> list[str]:
    unique = sorted(dict.fromkeys(names))
    return [name for name in unique if not any(_inside(name, [other]) for other in unique if other != name)]


def _inside(name: str, outer: Sequence[str]) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in outer)
