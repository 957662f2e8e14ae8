"""Adagrad that allocates state lazily, so frozen parameters have none."""

from collections.abc import Iterable
from typing import Any

import torch


class Adagrad(torch.optim.Adagrad):
    """`torch.optim.Adagrad`, but the state of a parameter is allocated with its first gradient. Numbers are the same.

    Args:
        params: Parameters or parameter groups.
        options: Keyword arguments of `torch.optim.Adagrad`.
    """

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        # torch allocates state for all parameters that its constructor gets, so it gets an empty one
        super().__init__([torch.empty(0)], **options)
        self.param_groups.clear()
        self.state.clear()
        groups = list(params)
        for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(dict(group))

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                step_device = parameter.device if group["fused"] else "cpu"  # as in torch
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=step_device),
                    "sum": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
