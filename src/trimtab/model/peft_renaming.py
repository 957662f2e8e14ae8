"""Keep the names of adapter targets, which PEFT renames as if they were trained with transformers 4.

Experts were single modules in transformers 4, and PEFT applies an adapter on modules named `down_proj` to the fused
experts of transformers 5. For DeepSeek, GLM-4-MoE and about twenty other types it does so for every adapter, although
their shared experts and dense blocks still have linear modules of that name.
"""

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_FUNCTIONS = {
    "convert_peft_config_for_transformers": lambda *_, **__: None,
    "convert_peft_adapter_state_dict_for_transformers": lambda *_, adapter_state_dict, **__: adapter_state_dict,
}
_lock = threading.RLock()


@contextmanager
def kept_names(keeps: bool = True) -> Iterator[None]:
    """A context in which PEFT does not change the names of modules.

    Args:
        keeps: Whether names are kept; otherwise the context does nothing.
    """
    if not keeps:
        yield
        return
    from peft.utils import transformers_weight_conversion as conversion

    with _lock:
        originals = {name: getattr(conversion, name) for name in _FUNCTIONS}
        try:
            vars(conversion).update(_FUNCTIONS)
            yield
        finally:
            vars(conversion).update(originals)


def renamed_targets(config: Any, model: torch.nn.Module) -> set[str]:
    """The target modules in an adapter's config that PEFT itself would replace with expert weights of this model."""
    from peft.utils import transformers_weight_conversion as conversion

    renamed = copy.deepcopy(config)
    conversion.convert_peft_config_for_transformers(renamed, model=model, conversions=None)
    return set(config.target_modules) - set(renamed.target_modules)


def are_names_of(model: torch.nn.Module, tensors: Iterable[str]) -> bool:
    """Whether the tensors of an adapter belong to modules of this model, so nothing has to be renamed.

    Args:
        model: The base model.
        tensors: Names of the adapter's own tensors, without PEFT's prefix.
    """
    modules = {name for name, _ in model.named_modules(remove_duplicate=False)}
    return all(_module_of(name) in modules for name in tensors)


def _module_of(tensor: str) -> str:
    """The module of the base that a tensor such as `mlp.experts.base_layer.lora_A.weight` belongs to."""
    parts: list[Any] = tensor.split(".")
    end = next((index for index, part in enumerate(parts) if part.startswith(("lora_", "ia3_"))), len(parts))
    return ".".join(part for part in parts[:end] if part != "base_layer")
