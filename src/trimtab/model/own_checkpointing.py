"""Transformers' own gradient checkpointing, which transformers 5.23 calls activation checkpointing."""

from typing import Any


def checkpoints_itself(model: Any) -> bool:
    """Whether a model recomputes activations with transformers' own implementation."""
    return bool(getattr(model, _name_of("is_{}_checkpointing", model), False))


def start_own_checkpointing(model: Any) -> None:
    """Make a transformers model recompute its activations."""
    getattr(model, _name_of("{}_checkpointing_enable", model))({"use_reentrant": False})


def stop_own_checkpointing(model: Any) -> None:
    """Make a transformers model keep its activations."""
    getattr(model, _name_of("{}_checkpointing_disable", model))()


def _name_of(form: str, model: Any) -> str:
    """The method name that this version of transformers does not warn about."""
    newer = form.format("activation")
    return newer if hasattr(type(model), newer) else form.format("gradient")
