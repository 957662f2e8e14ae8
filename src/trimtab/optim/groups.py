"""Which parameters an optimizer gets, and which of them decay: biases and norms do not, embeddings by choice.

Norms and embeddings are told by the type of their module, because names differ from model to model (`ln_1`, `norm`,
`final_layer_norm`) and say nothing in a model of one's own.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trimtab.errors import RecipeError

# _NormBase is the parent of every BatchNorm and InstanceNorm
_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm, nn.modules.batchnorm._NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def decay_groups(
    model: nn.Module, weight_decay: float, *, decay_embeddings: bool = True, include_frozen: bool = False
) -> list[dict[str, Any]]:
    """Split the parameters of a model into those that decay and those that do not.

    The groups are the same for every `weight_decay`, zero too, so that a run can go on with another value.

    Args:
        model: The model; a parameter that stands in several places counts once.
        weight_decay: For the group that decays.
        decay_embeddings: Whether embeddings decay. An output layer tied to one is the same parameter and follows it.
        include_frozen: Also take parameters that do not train now, because they will be unfrozen later.

    Returns:
        Parameter groups for an optimizer, in the order of the model, without empty ones.
    """
    spared = {id(parameter) for parameter in _without_decay(model, decay_embeddings)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for parameter in model.parameters():
        # integers hold quantized weights, which never train
        if (parameter.requires_grad or include_frozen) and parameter.is_floating_point():
            (undecayed if id(parameter) in spared else decayed).append(parameter)
    if not decayed and not undecayed:
        raise RecipeError(
            f"no parameter of this {type(model).__name__} trains: all are frozen",
            "let some train: check train.freeze, or requires_grad of the model's parameters",
        )
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _without_decay(model: nn.Module, decay_embeddings: bool) -> Iterator[torch.nn.Parameter]:
    for module in model.modules():
        spares_all = _is_norm(module) or (isinstance(module, _EMBEDDINGS) and not decay_embeddings)
        for name, parameter in module.named_parameters(recurse=False):
            if spares_all or parameter.dim() < 2 or _is_bias(name):
                yield parameter


def _is_norm(module: nn.Module) -> bool:
    """Models bring norms of their own (LlamaRMSNorm, T5LayerNorm); most are no subclass of torch's."""
    return isinstance(module, _NORMS) or type(module).__name__.endswith("Norm")


def _is_bias(name: str) -> bool:
    """Biases are one-dimensional and need no name, but for those of stacked experts and of MultiheadAttention."""
    return name == "bias" or name.endswith("_bias") or name.startswith("bias_")
