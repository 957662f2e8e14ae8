"""Allocate the state of an optimizer before its first step, so that no step runs out of memory in the middle.

The optimizer's own code allocates it, called with zero gradients expanded from a scalar, which take no memory.
"""

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from trimtab.optim.quantized import allocate_state


@torch.no_grad()
def preallocate_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Allocate the state of parameters that have none yet. The results of later steps are bit-identical.

    Args:
        optimizer: The optimizer itself, not a prepared one. Its parameters must not have gradients.
        parameters: Parameters that are trainable now or later.
    """
    wanted = [parameter for parameter in parameters if not optimizer.state.get(parameter)]
    if "allocate_state" in vars(optimizer):  # a hook of `trimtab.optim.offloaded_state`
        allocate_state(optimizer, wanted)
    else:
        preallocate_as_usual(optimizer, wanted)


@torch.no_grad()
def preallocate_as_usual(optimizer: torch.optim.Optimizer, wanted: Sequence[torch.Tensor]) -> None:
    """Allocate the state of parameters with the optimizer's own code, on the devices of the parameters.

    Args:
        optimizer: The optimizer.
        wanted: Parameters without state.
    """
    own: Any = getattr(type(optimizer), "allocate_state", None)
    if own is not None:
        own(optimizer, wanted)
        return
    if hasattr(optimizer, "get_state_buffer"):
        allocate_state(optimizer, wanted)
        return
    if isinstance(optimizer, torch.optim.SGD):
        _give_momentum(optimizer, {id(parameter) for parameter in wanted})
        return
    make: Any = getattr(optimizer, "_init_group", None)
    if make is None:
        return
    num_lists = _num_lists(type(optimizer))
    ids = {id(parameter) for parameter in wanted}
    for group in optimizer.param_groups:
        chosen = [parameter for parameter in group["params"] if id(parameter) in ids]
        try:
            for parameter in chosen:
                parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
            make({**group, "params": chosen}, *([] for _ in range(num_lists)))
        finally:
            for parameter in chosen:
                parameter.grad = None


def _give_momentum(optimizer: torch.optim.SGD, wanted: set[int]) -> None:
    """Allocate momentum buffers of zeros; SGD's first step then gives the same bits as without a buffer."""
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in (p for p in group["params"] if id(p) in wanted):
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _num_lists(kind: type) -> int:
    """The number of lists that `_init_group` takes; it differs by optimizer, and an override may forward *lists."""
    makers = (vars(base).get("_init_group") for base in kind.__mro__)
    return max(len(inspect.signature(make).parameters) - 2 for make in makers if make is not None)  # self and group
