"""Regular expressions in an adapter's config, replaced by the names of the modules that they match.

An adapter may come from anywhere, and a regular expression of a few characters can keep Python's `re` busy for years.
So PEFT never sees one: each is matched here, by an engine that can be stopped, and PEFT gets the names.
"""

import copy
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trimtab.errors import ModelError
from trimtab.model.adapter_targets import shortened

_SECONDS = 2.0  # of CPU time, for all names of a model; what people write takes milliseconds
_LONGEST_SHOWN = 60
_PLAIN = re.compile(r"(?:[\w-]|\\?\.|\\-)*")  # names and dots, which cannot take long


def without_patterns(config: Any, model: torch.nn.Module, place: str | Path) -> Any:
    """A copy of PEFT's LoRA config that has names of this model's modules in the place of regular expressions.

    Args:
        config: What adapter_config.json says.
        model: The base.
        place: Where the config is from, for messages.

    Raises:
        ModelError: A regular expression is not valid, or takes too long.
    """
    names = [name for name, _ in model.named_modules() if name]
    plain = copy.deepcopy(config)
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, str) and pattern != "all-linear" and not _PLAIN.fullmatch(pattern):
            found = list(_matching(pattern, names, f"{place}: {key}"))
            setattr(plain, key, shortened(found, model) if found else [pattern])  # which PEFT then does not find either
    for key in ("rank_pattern", "alpha_pattern"):
        setattr(plain, key, _by_name(getattr(config, key) or {}, names, f"{place}: {key}"))
    layers = config.layers_pattern or []
    for pattern in [layers] if isinstance(layers, str) else layers:
        if not _PLAIN.fullmatch(pattern):
            raise ModelError(
                f"{place}: layers_pattern is the regular expression {_shown(pattern)}", 'name the layers: "layers"'
            )
    return plain


def _by_name(values: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, Any]:
    """Values by name of a module; of several patterns that match a name the first one counts, as in PEFT."""
    if not isinstance(values, Mapping):
        raise ModelError(f"{where} is a {type(values).__name__}", "write {name of a module: number} there")
    if all(_PLAIN.fullmatch(pattern) for pattern in values):
        return dict(values)
    found: dict[str, Any] = {}
    for pattern, value in values.items():
        for name in _matching(rf"(.*\.)?({pattern})", names, where):
            found.setdefault(re.escape(name), value)
    return found


def _matching(pattern: str, names: Sequence[str], where: str) -> Iterator[str]:
    import regex  # type: ignore[import-untyped]

    cure = 'write a list of names of modules there, such as ["q_proj", "v_proj"]'
    ends_at = time.process_time() + _SECONDS
    try:
        compiled = regex.compile(pattern)
        for name in names:
            if compiled.fullmatch(name, timeout=max(ends_at - time.process_time(), 0.001)):
                yield name
    except TimeoutError:
        problem = f"{where}: the regular expression {_shown(pattern)} takes too long on names of modules"
        raise ModelError(problem, cure) from None
    except (regex.error, RecursionError) as error:
        raise ModelError(f"{where}: {_shown(pattern)} is no regular expression: {error}", cure) from None


def _shown(pattern: str) -> str:
    return repr(pattern if len(pattern) <= _LONGEST_SHOWN else f"{pattern[:_LONGEST_SHOWN]} …")
