"""Hooks on modules: code that computes several modules together must know whether any hook observes them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_PASSIVE = "_trimtab_passive"
Hook = TypeVar("Hook", bound=Callable[..., Any])


def passive(hook: Hook) -> Hook:
    """Mark a hook that only follows which module runs, and need not be called for every module."""
    hook.__dict__[_PASSIVE] = True
    return hook


def has_hooks(*modules: torch.nn.Module) -> bool:
    """Whether modules have to be called because of their hooks."""
    return any(
        _PASSIVE not in getattr(hook, "__dict__", ())
        for module in modules
        for hooks in (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
        for hook in hooks.values()
    )
