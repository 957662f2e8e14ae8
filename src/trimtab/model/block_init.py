"""Models with random weights from a config, initialized block by block.

The whole model is never on the device: blocks that are quantized, or that stay in host memory, are drawn on the device
one after another.
"""

from typing import Any

import torch

from trimtab.model.blocks import blocks_of


def build_in_host_memory(auto_class: Any, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Build a model in host memory whose weights are drawn on a device, which is much faster.

    The weights depend only on torch's seed and the device, but differ from those of a model that is drawn as a whole.

    Args:
        auto_class: Auto class of transformers for the kind of model.
        config: Config of transformers.
        dtype: Dtype of the weights.
        device: The device to draw on.
    """
    model = skeleton(auto_class, config, dtype)
    with torch.no_grad():
        for name, block in blocks_of(model):
            materialize(block, device)
            initialize(block, owner_of(model, name))
            block.to("cpu")
        materialize(model, device)
        model.init_weights()  # initializes the remaining modules and ties weights
    return model.to("cpu")


def skeleton(auto_class: Any, config: Any, dtype: torch.dtype) -> Any:
    """Build a model on the meta device."""
    with torch.device("meta"):
        return auto_class.from_config(config, dtype=dtype)


def materialize(module: torch.nn.Module, device: torch.device) -> None:
    """Allocate every meta tensor on the device; tied tensors stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        empty = torch.empty_like(tensor, device=device)
                        is_weight = isinstance(tensor, torch.nn.Parameter)
                        made[id(tensor)] = torch.nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    tensors[name] = made[id(tensor)]


def initialize(module: torch.nn.Module, owner: Any) -> None:
    """Initialize a module with `_init_weights` of the model that it belongs to, children first."""
    from transformers import PreTrainedModel

    for child in module.children():
        initialize(child, child if isinstance(child, PreTrainedModel) else owner)
    owner._init_weights(module)
    module._is_hf_initialized = True  # type: ignore[assignment]


def owner_of(model: Any, name: str) -> Any:
    """The innermost transformers model around a module, whose `_init_weights` initializes it."""
    from transformers import PreTrainedModel

    owner, module = model, model
    for part in name.split(".")[:-1]:
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
