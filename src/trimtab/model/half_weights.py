"""Weights of linear layers in half precision, converted all at the same time instead of layer by layer.

Under autocast every linear layer converts its fp32 weight and bias in each forward, and their gradients in each
backward: four small kernels for each layer. Here one kernel converts copies of all weights, with which the model
computes, and another one converts the gradients of the copies. The numbers are those of autocast.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from trimtab.model.gradient_hooks import register_gradient_hook

_NAMES = ("weight", "bias")
_EXACT = "exact"  # attribute of a rounded parameter

T = TypeVar("T")


class HalfWeights:
    """Copies of the trainable fp32 weights of a model's linear layers; none for a model with adapters.

    Args:
        model: The model; it is changed only inside `in_use`.
        dtype: The dtype of matrix products; None or fp32 makes no copies.
    """

    def __init__(self, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        self._places: list[tuple[torch.nn.Module, str]] = []
        self.parameters: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []
        self._adds_gradients = [True]  # in a list, which the hooks of the copies keep alive instead of this object
        self.touched: dict[torch.nn.Parameter, None] = {}  # parameters to which gradients of copies were added
        if dtype not in (torch.float16, torch.bfloat16) or any(hasattr(module, "lora_A") for module in model.modules()):
            return
        for module, name, parameter in linear_parameters(model):
            self._add(module, name, parameter, dtype)

    def _add(self, module: torch.nn.Module, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype) -> None:
        copy = torch.nn.Parameter(torch.empty_like(parameter, dtype=dtype))
        self._places.append((module, name))
        self.parameters.append(parameter)
        self.copies.append(copy)

        adds, touched = self._adds_gradients, self.touched

        def add(half: torch.Tensor) -> None:
            if adds[0] and half.grad is not None:
                touched[parameter] = None
                if parameter.grad is None:
                    parameter.grad = half.grad.to(parameter.dtype)
                else:
                    parameter.grad.add_(half.grad)
                half.grad = None

        register_gradient_hook(copy, add)

    @contextmanager
    def in_use(self, *, keeps_gradients: bool = False) -> Iterator[None]:
        """Make the model compute with copies of the current weights, in forward and backward.

        Args:
            keeps_gradients: Whether gradients stay with the copies, for `take_gradients`; else each is immediately
                added to that of its parameter.
        """
        if not self.copies:
            yield
            return
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.parameters)
        self._adds_gradients[0] = not keeps_gradients
        self._place(self.copies)
        try:
            yield
        finally:
            self._place(self.parameters)
            self._adds_gradients[0] = True

    def _place(self, weights: list[torch.Tensor]) -> None:
        for (module, name), weight in zip(self._places, weights, strict=True):
            module._parameters[name] = weight  # type: ignore[assignment]

    def only_in_forward(self, compute: Callable[[Any, Any], T]) -> Callable[[Any, Any], T]:
        """Make a function of a model and a batch see the original parameters, except inside the model's forward.

        For user code inside `in_use`, which may read weights, or call a layer outside autocast.
        """
        if not self.copies:
            return compute
        depth = 0

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1
            self._place(self.copies)

        def leave(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self._place(self.parameters)

        def computed(model: Any, batch: Any) -> T:
            hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave, always_call=True)]
            self._place(self.parameters)
            try:
                return compute(model, batch)
            finally:
                for hook in hooks:
                    hook.remove()
                self._place(self.copies)  # for blocks that backward recomputes

        return computed

    def take_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return parameters with the gradients that their copies received, and clear those of the copies."""
        found = [(p, copy.grad) for p, copy in zip(self.parameters, self.copies, strict=True) if copy.grad is not None]
        for copy in self.copies:
            copy.grad = None
        return found


def linear_parameters(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Trainable fp32 parameters that only linear layers use, which autocast converts: module, name and parameter."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for module in model.modules():
        # an exact type: other classes may use their weights in other ways
        for name in _NAMES if type(module) is torch.nn.Linear else ():
            parameter = module._parameters[name]
            if parameter is not None and _is_wanted(parameter) and owners[id(parameter)] == 1:
                yield module, name, parameter


def round_weights(parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype) -> None:
    """Keep parameters only in half precision, with which a model computes; `take_exact` returns the exact values.

    Call it before a model moves to its device, which may have no memory for fp32 weights.
    """
    for parameter in parameters:
        vars(parameter)[_EXACT] = parameter.data
        parameter.data = parameter.data.to(dtype)


def is_rounded(parameter: torch.Tensor) -> bool:
    """Whether a parameter was rounded, and its exact values were not yet taken."""
    return _EXACT in vars(parameter)


def take_exact(parameter: torch.Tensor) -> torch.Tensor:
    """Return the exact values of a parameter and remove them from it."""
    exact: torch.Tensor = vars(parameter).pop(_EXACT, parameter.detach())
    return exact


def _is_wanted(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.dtype is torch.float32
