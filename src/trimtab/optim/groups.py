"""Parameter groups with and without weight decay: biases and norms do not decay, embeddings optionally.

Norms and embeddings are recognized by the type of their module, because names differ between models (`ln_1`, `norm`,
`final_layer_norm`) and are arbitrary in custom models.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from trimtab.errors import RecipeError

# _NormBase is the base class of every BatchNorm and InstanceNorm
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def decay_groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True, include_frozen: bool = False
) -> list[dict[str, Any]]:
    """Split the parameters of a model into a group with weight decay and one without.

    The groups are the same for every value of `weight_decay`, including 0, so a run can resume with another value.

    Args:
        model: The model; tied parameters count once.
        weight_decay: Weight decay of the first group.
        decay_embeddings: Whether embeddings decay. An output layer tied to an embedding follows it.
        include_frozen: Whether to include parameters with requires_grad=False, because they are unfrozen later.

    Returns:
        Non-empty parameter groups for an optimizer, in the order of the model.
    """
    spared = {id(parameter) for parameter in _without_decay(model, decay_embeddings)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        # integer parameters are quantized weights, which are never trained
        if (parameter.requires_grad or include_frozen) and parameter.is_floating_point():
            (undecayed if id(parameter) in spared else decayed).append(parameter)
    if not decayed and not undecayed:
        raise RecipeError(
            f"{type(model).__name__} has no trainable parameters: all are frozen",
            "unfreeze some: check train.freeze, or requires_grad of the model's parameters",
        )
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def split_by_rate(groups: list[dict[str, Any]], rates: Mapping[int, float]) -> list[dict[str, Any]]:
    """Split parameter groups so that some parameters have separate learning rates.

    Args:
        groups: Parameter groups.
        rates: Learning rates by the id of the parameter.

    Returns:
        The groups without these parameters, each followed by one group for each of its other rates.
    """
    split: list[dict[str, Any]] = []
    for group in groups:
        by_rate: dict[float | None, list[nn.Parameter]] = {}
        for parameter in group["params"]:
            by_rate.setdefault(rates.get(id(parameter)), []).append(parameter)
        for rate in sorted(by_rate, key=lambda rate: -1.0 if rate is None else rate):
            split.append({**group, "params": by_rate[rate], **({} if rate is None else {"lr": rate})})
    return split


def _without_decay(model: nn.Module, decay_embeddings: bool) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        spares_all = _is_norm(module) or (isinstance(module, _EMBEDDINGS) and not decay_embeddings)
        for name, parameter in module.named_parameters(recurse=False):
            if spares_all or parameter.dim() < 2 or _is_bias(name):
                yield parameter


def _is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm; most custom ones (LlamaRMSNorm, T5LayerNorm) do not subclass torch's."""
    return isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")


def _is_bias(name: str) -> bool:
    """Whether a name is that of a bias; only biases of stacked experts and MultiheadAttention are not 1-D."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")
