"""Replace regular expressions in an adapter's config by the names of the modules that they match.

Adapters come from untrusted sources, and a short regular expression can keep Python's `re` busy for years (catastrophic
backtracking). So they are matched here with the `regex` package, which has a timeout, and PEFT gets module names only.
"""

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import ModelError
from trimtab.model.adapter_targets import shorten_names
from trimtab.model.expert_weights import fused_experts

_TIMEOUT_S = 2.0  # CPU time for all module names of a model; ordinary patterns take milliseconds
_MAX_SHOWN = 60
_PLAIN = re.compile(r"(?:[\w-]|\\?\.|\\-)*")  # names and dots only, which cannot backtrack


def resolve_patterns(config: Any, model: torch.nn.Module, place: str | Path) -> Any:
    """Copy PEFT's config of an adapter, with module names of this model instead of regular expressions.

    Args:
        config: The config that adapter_config.json contains.
        model: The base model.
        place: Path of the config, for messages.

    Raises:
        ModelError: A regular expression is invalid or takes too long.
    """
    names = [name for name, _ in model.named_modules() if name]
    plain = copy.deepcopy(config)
    for key in ("target_modules", "exclude_modules", "feedforward_modules"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, str) and pattern != "all-linear" and not _PLAIN.fullmatch(pattern):
            found = list(_matching(pattern, names, f"{place}: {key}"))
            # without a match PEFT gets the pattern and reports that nothing matches
            setattr(plain, key, shorten_names(found, model) if found else [pattern])
    for key in ("rank_pattern", "alpha_pattern"):
        if hasattr(config, key):  # LoRA only
            adapted = [*names, *fused_experts(model)]
            setattr(plain, key, _by_name(getattr(config, key) or {}, adapted, f"{place}: {key}"))
    layers = getattr(config, "layers_pattern", None) or []
    for pattern in [layers] if isinstance(layers, str) else layers:
        if not _PLAIN.fullmatch(pattern):
            raise ModelError(
                f"{place}: layers_pattern is the regular expression {_shown(pattern)}",
                'write the name of the layers: "layers"',
            )
    return plain


def _by_name(values: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """Map patterns to module names; if several patterns match a name, the first one applies, as in PEFT."""
    if not isinstance(values, Mapping):
        raise ModelError(f"{where} is a {type(values).__name__}, not a mapping", "write {module name: number}")
    if all(_PLAIN.fullmatch(pattern) for pattern in values):
        return dict(values)
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        for name in _matching(rf"(.*\.)?({pattern})", names, where):
            found.setdefault(re.escape(name), value)
    return found


def _matching(pattern: str, names: Sequence[str], where: str) -> Iterator[str]:
    import regex  # type: ignore[import-untyped]

    cure = 'write a list of module names instead, such as ["q_proj", "v_proj"]'
    ends_at = time.process_time() + _TIMEOUT_S
    try:
        compiled = regex.compile(pattern)
        for name in names:
            if compiled.fullmatch(name, timeout=max(ends_at - time.process_time(), 0.001)):
                yield name
    except TimeoutError:
        problem = f"{where}: the regular expression {_shown(pattern)} takes too long to match the module names"
        raise ModelError(problem, cure) from None
    except (regex.error, RecursionError) as error:
        raise ModelError(f"{where}: {_shown(pattern)} is not a regular expression: {error}", cure) from None


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _MAX_SHOWN else f"{pattern[:_MAX_SHOWN]} …")
