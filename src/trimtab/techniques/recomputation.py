"""Gradient checkpointing: blocks store only their inputs in forward, and backward recomputes their activations.

It can be chosen per block, for any transformers model and most others. Results are bit-identical to those of the plain
step, because a recomputed block draws the same random numbers again.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trimtab.errors import RecipeError
from trimtab.log import log_info_once, say
from trimtab.model.blocks import blocks_of
from trimtab.model.own_checkpointing import checkpoints_itself, stop_own_checkpointing
from trimtab.model.random_draws import Draws, ReplayedDraws, WatchedDraws
from trimtab.model.selective_recompute import saving_contexts
from trimtab.recipe.schema import Recipe
from trimtab.recipe.yaml_text import read_value
from trimtab.techniques.base import Case, Phase, Site, StepSpec, Technique, as_text
from trimtab.techniques.compilation import conflict

_KEY = "memory.gradient_checkpointing"
_OWN_FORWARD = "_trimtab_plain_block"
_CONFIGS = "_trimtab_configs_of_block"
_KINDS = "none, all, ops, {every: 2}, {all_but_every: 4} or {layers: [0, 1, -1]}"
# Parts of the blocks to recompute, by the number of blocks from which they are tried; the fewest blocks come first.
_PARTS: dict[int, tuple[dict[str, int], ...]] = {
    4: ({"every": 2},),
    8: ({"every": 4}, {"every": 2}, {"all_but_every": 4}),
    16: ({"every": 8}, {"every": 4}, {"every": 2}, {"all_but_every": 4}),
}


class GradientCheckpointing(Technique):
    """Recompute blocks in backward instead of storing their activations."""

    key = "gradient_checkpointing"
    setting = _KEY
    phase = Phase.RECOMPUTATION
    changes_model_when_off = True  # for a model whose config enables transformers' own checkpointing
    is_slower_with_each_value = True
    needs_prediction = True
    advice = "all"
    study = ("checkpointing", ("none", "ops", ("every second", {"every": 2}), "all"))

    def values(self, case: Case) -> tuple[str, ...]:
        """Return none, parts of the blocks, or all of them; a model that already recomputes is not changed."""
        asked = self.asked(case.recipe)
        if asked != "auto":
            return (as_text(asked),)
        num_blocks = len(blocks_of(case.model))
        recomputes_already = case.recipe is None and checkpoints_itself(case.model)
        if not num_blocks or recomputes_already:
            return ("none",)
        parts = next((parts for fewest, parts in sorted(_PARTS.items(), reverse=True) if num_blocks >= fewest), ())
        return ("none", *map(as_text, parts), "all")

    def change_model(self, model: nn.Module, value: str, site: Site) -> None:
        """Wrap the chosen blocks; in a trace, the chosen ones among the blocks that were kept."""
        if value == self.off and site.recipe is None:  # a user's own loop keeps its model's setting
            return
        checkpoint_layers(model, in_trace(read_value(value), site))

    def refuse(self, spec: StepSpec, case: Case) -> str | None:
        """Refuse `ops` with compiled blocks: it observes every operation, and a compiled block is one operation."""
        compiled = spec["compile"]
        if keeps_products(spec[self.key]) and compiled != "off":
            return conflict(f"{_KEY}: ops", compiled, "which hides single operations")
        return None

    def block_mark(self, value: str, num_blocks: int, recipe: Recipe | None) -> Callable[[int], Any] | None:
        """Distinguish recomputed blocks from others."""
        if value == "none" or not num_blocks:
            return None
        return set(chosen_blocks(read_value(value), num_blocks)).__contains__

    def shares(self, values: Sequence[str], case: Case) -> tuple[tuple[str, float], ...]:
        """Return shares if blocks have equal size and values choose evenly among them: not for an odd number."""
        blocks = [block for _, block in blocks_of(case.model)] if len(values) > 1 and case.model is not None else []
        sizes = {sum(parameter.numel() for parameter in block.parameters()) for block in blocks}
        if len(sizes) != 1 or len(blocks) % 2:
            return ()
        chosen = {value: [] if value == "none" else chosen_blocks(read_value(value), len(blocks)) for value in values}
        return tuple((value, len(numbers) / len(blocks)) for value, numbers in chosen.items())

    def plain_loop(self, value: str) -> dict[str, Any] | None:
        """Return the setting of transformers' own switch, which recomputes all blocks or none."""
        return {"recomputes": value == "all"} if value in ("none", "all") else None

    def describe(self, value: str) -> str:
        """Return a text such as "recompute every 2nd"."""
        return f"recompute {describe_blocks(value)}"


def describe_blocks(value: str) -> str:
    """Describe a choice of blocks, such as "every 2nd"."""
    words = re.sub(r"every: (\d+)", lambda found: f"every {_ordinal(int(found[1]))}", value.strip("{}"))
    return words.replace("_", " ")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if 10 < number % 100 < 14 else ending}"


def keeps_products(value: str) -> bool:
    """Whether recomputed blocks keep the results of single operations."""
    return value == "ops"


def checkpoint_layers(model: nn.Module, which: str | Mapping[str, Any]) -> int:
    """Choose the blocks of `model` to recompute in backward; this replaces an earlier choice.

    A block is recomputed only in training mode with gradients enabled. A block without trainable parameters and without
    inputs that require gradients stores nothing anyway and is not recomputed.

    Args:
        model: The model; its parameters, their names and its outputs do not change.
        which: "none"; "all"; "ops" (every block, but results of matrix products and attention are kept); {"every": k}
            (blocks 0, k, 2k …: the last one is left out if possible, so that its memory is free before any other is
            recomputed); {"all_but_every": k} (all blocks except k - 1, 2k - 1 …); {"layers": [...]}, counted from 0,
            negative numbers from the end, encoder before decoder.

    Returns:
        The number of blocks that are recomputed.
    """
    _stop_own_checkpointing(model)
    for module in model.modules():
        _unwrap(module)
    if which == "none":
        return 0
    blocks = [block for _, block in blocks_of(model)]
    if not blocks:
        children = ", ".join(f"{name} ({type(child).__name__})" for name, child in model.named_children())
        raise RecipeError(
            f"{_KEY}: {type(model).__name__} has no list of blocks to recompute, only {children or 'itself'}",
            f"{_KEY}: none",
        )
    chosen = chosen_blocks(which, len(blocks))
    contexts = _keeping_products if which == "ops" else _keeping_nothing
    for number in chosen:
        _wrap(blocks[number], contexts)
    return len(chosen)


def in_trace(which: str | Mapping[str, Any], site: Site) -> str | Mapping[str, Any]:
    """The same choice of blocks in a model that a trace has shortened."""
    if site.kept_blocks is None or isinstance(which, str):
        return which
    chosen = set(chosen_blocks(which, 1 + max(site.kept_blocks)))
    return {"layers": [index for index, number in enumerate(site.kept_blocks) if number in chosen]}


def chosen_blocks(which: str | Mapping[str, Any], num_blocks: int, key: str = _KEY) -> list[int]:
    """The numbers of the blocks that a setting chooses, out of `num_blocks`."""
    if which in ("all", "ops"):
        return list(range(num_blocks))
    if isinstance(which, Mapping) and len(which) == 1:
        ((kind, value),) = which.items()
        if kind == "every" and type(value) is int and value >= 1:
            return list(range(0, num_blocks, value))
        if kind == "all_but_every" and type(value) is int and value >= 2:
            return [number for number in range(num_blocks) if number % value != value - 1]
        if kind == "layers" and not isinstance(value, str) and all(type(number) is int for number in value):
            outside = [number for number in value if not -num_blocks <= number < num_blocks]
            if outside:
                count = f"{num_blocks} block{'s' if num_blocks > 1 else ''}"
                raise RecipeError(
                    f"{key}: no block {', '.join(map(str, outside))}; the model has {count}",
                    f"use numbers from {-num_blocks} to {num_blocks - 1}; negative ones count from the end",
                )
            return sorted({number % num_blocks for number in value})
    raise RecipeError(f"{key}: {which!r} is not valid", f"use one of {_KINDS}")


def _stop_own_checkpointing(model: nn.Module) -> None:
    if checkpoints_itself(model):
        stop_own_checkpointing(model)
        say(f"the gradient checkpointing of {type(model).__name__} was switched off; {_KEY} controls it")


def _wrap(block: nn.Module, contexts: Callable[[list[torch.device]], tuple[WatchedDraws, ReplayedDraws]]) -> None:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = self.__dict__[_OWN_FORWARD]
        if not self.training or not torch.is_grad_enabled() or not _anything_trains(self, args, kwargs):
            return own(*args, **kwargs)
        return _recomputed(self, own, args, kwargs, contexts)

    # Bound methods follow their object through copy.deepcopy; a closure over the block would not.
    own = block.forward
    forward.__wrapped__ = getattr(own, "__func__", own)  # type: ignore[attr-defined]  # for inspect.signature
    block.__dict__[_OWN_FORWARD] = own
    configs: dict[int, Any] = {id(module.config): module.config for module in block.modules() if _has_attention(module)}
    block.__dict__[_CONFIGS] = list(configs.values())
    block.forward = MethodType(forward, block)


def _unwrap(block: nn.Module) -> None:
    own = block.__dict__.pop(_OWN_FORWARD, None)
    block.__dict__.pop(_CONFIGS, None)
    if own is not None:
        del block.__dict__["forward"]
        if own != block.forward:
            block.forward = own


def _recomputed(
    block: nn.Module,
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    contexts: Callable[[list[torch.device]], tuple[WatchedDraws, ReplayedDraws]],
) -> Any:
    args, kwargs = _without_cache(block, args, kwargs)
    names, num_args = tuple(kwargs), len(args)
    attention = _AttentionOf(block)

    def run(*values: Any) -> Any:
        with attention:
            return own(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

    values = (*args, *kwargs.values())
    # torch looks for devices, and keeps tensors, only among positional arguments
    devices = list({value.device for value in values if isinstance(value, torch.Tensor)})
    return checkpoint(run, *values, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts(devices))


class _AttentionOf:
    """The attention implementation of a block during its forward, which its recomputation must use again.

    Models switch it during a forward, and the graphs of compiled blocks are valid for one implementation only.
    """

    def __init__(self, block: nn.Module) -> None:
        self._then = [(config, config._attn_implementation) for config in block.__dict__[_CONFIGS]]
        self._now = self._then

    def __enter__(self) -> None:
        self._now = [(config, config._attn_implementation) for config, _ in self._then]
        self._set(self._then)

    def __exit__(self, *error: object) -> None:
        self._set(self._now)

    @staticmethod
    def _set(names: list[tuple[Any, str]]) -> None:
        for config, name in names:
            if config._attn_implementation != name:
                config._attn_implementation = name


def _has_attention(module: nn.Module) -> bool:
    return getattr(getattr(module, "config", None), "_attn_implementation", None) is not None


def _anything_trains(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    values = (*args, *kwargs.values())
    # also for a prefix of keys and values, which is passed as a cache: see `trimtab.model.prefix_tuning`
    return any(getattr(value, "requires_grad", False) for value in values) or any(
        parameter.requires_grad for parameter in block.parameters()
    )


def _without_cache(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Remove empty caches from the arguments: a recomputed block would write to them twice."""
    caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
    if not caches:
        return args, kwargs
    layer = next((module.layer_idx for module in block.modules() if hasattr(module, "layer_idx")), 0)
    if any(_has_entries(cache, layer) for cache in caches):
        raise RecipeError(
            f"{_KEY}: {type(block).__name__} got non-empty past_key_values, which recomputation would extend twice",
            f"train without past_key_values, or {_KEY}: none",
        )
    log_info_once("past_key_values stay empty with gradient checkpointing; set use_cache=False to avoid this message")
    args = tuple(None if _is_cache(value) else value for value in args)
    kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    return args, kwargs | ({"use_cache": False} if "use_cache" in kwargs else {})


def _has_entries(cache: Any, layer: Any) -> bool:
    try:
        return bool(cache.get_seq_length(layer))
    except ValueError:  # a layer with linear attention has a state of fixed size
        return bool(cache.has_previous_state(layer))


def _is_cache(value: Any) -> bool:
    stores_nothing = getattr(value, "stores_nothing", False)
    return hasattr(value, "get_seq_length") and hasattr(value, "update") and not stores_nothing


def _keeping_nothing(devices: list[torch.device]) -> tuple[WatchedDraws, ReplayedDraws]:
    drawn = Draws(devices)
    return WatchedDraws(drawn), ReplayedDraws(drawn)


def _keeping_products(devices: list[torch.device]) -> tuple[WatchedDraws, ReplayedDraws]:
    drawn = Draws(devices)
    keeping, handing_out = saving_contexts()
    return WatchedDraws(drawn, keeping), ReplayedDraws(drawn, handing_out)
