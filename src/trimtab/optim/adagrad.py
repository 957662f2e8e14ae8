"""Adagrad whose sums are made when a parameter gets its first gradient, so that frozen parameters keep nothing."""

from collections.abc import Iterable
from typing import Any

import torch


class Adagrad(torch.optim.Adagrad):
    """torch's Adagrad without sums for parameters that have never trained; the numbers are the same.

    Args:
        params: Parameters, or groups of them.
        lr: Learning rate.
        eps: Added to the root of a sum.
        fused: Whether a step is one pass over everything.
    """

    def __init__(self, params: Iterable[Any], *, lr: float, eps: float, fused: bool | None = None) -> None:
        # torch makes the sums of all parameters that its constructor sees: it sees an empty one
        super().__init__([torch.empty(0)], lr=lr, eps=eps, fused=fused)
        self.param_groups.clear()
        self.state.clear()
        groups = list(params)
        for group in groups if groups and isinstance(groups[0], dict) else [{"params": groups}]:
            self.add_param_group(dict(group))

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        for parameter in group["params"]:
            if parameter.grad is not None and not self.state[parameter]:
                home = parameter.device if group["fused"] else "cpu"  # where torch keeps its count
                self.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=home),
                    "sum": torch.zeros_like(parameter, memory_format=torch.preserve_format),
                }
        return super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
