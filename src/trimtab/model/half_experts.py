"""Fused experts under autocast: torch casts the inputs of matrix products, but not those of grouped products.

transformers computes fused experts with grouped products in the dtype of their weights, which is fp32 in mixed
precision. Here weights and inputs of experts are cast in the same way as autocast does for linear layers; the gradients
of the weights are fp32. Without autocast nothing changes.
"""

from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch

_OWN_FORWARD = "_trimtab_experts_forward"
_GROUPED = "grouped_mm"  # transformers' other implementations call functions that autocast handles
_ALIGNED = 8  # alignment in numbers of 2 bytes: grouped products need rows of a multiple of 16 bytes


def cast_experts(model: torch.nn.Module) -> None:
    """Make the fused experts of a model compute in the dtype of autocast, if it is enabled."""
    for module in _experts(model):
        if _OWN_FORWARD not in module.__dict__:
            # Bound methods follow their object through copy.deepcopy; a closure over the module would not.
            module.__dict__[_OWN_FORWARD] = module.forward
            module.forward = MethodType(_forward, module)


def restore_experts(model: torch.nn.Module) -> None:
    """Undo `cast_experts`."""
    for module in model.modules():
        own = module.__dict__.pop(_OWN_FORWARD, None)
        if own is not None:
            del module.__dict__["forward"]
            if own != module.forward:
                module.forward = own


def _experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules whose forward transformers chooses by the experts implementation in the config.

    Modules whose rows are aligned only in fp32 are not changed.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        is_chosen = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
        is_aligned = all(size % _ALIGNED == 0 for weight in module.parameters(False) for size in weight.shape[1:])
        if is_chosen and is_aligned and hasattr(config, "_experts_implementation"):
            yield module


class _CastWeights:
    """Experts as transformers' functions see them: an attribute that is an fp32 tensor is cast when it is read."""

    def __init__(self, experts: torch.nn.Module, dtype: torch.dtype) -> None:
        self._experts, self._dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        is_fp32 = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self._dtype) if is_fp32 else value


def _forward(self: Any, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    own, device = self.__dict__[_OWN_FORWARD], hidden.device.type
    if self.config._experts_implementation != _GROUPED or not torch.is_autocast_enabled(device):
        return own(hidden, *args, **kwargs)  # type: ignore[no-any-return]
    dtype = torch.get_autocast_dtype(device)
    experts = _CastWeights(self, dtype)
    result: torch.Tensor = own.__func__(experts, hidden.to(dtype), *args, **kwargs)
    return result.to(hidden.dtype)
