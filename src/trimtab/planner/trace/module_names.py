"""Name the tensors of a trace by the module that computes them, or by their parameter.

Inside a repeated block a name starts with a dot and is relative to the block, because block numbers differ in a
shortened model: `full_name` adds the block.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trimtab.model.blocks import stacks_of
from trimtab.model.module_hooks import passive


class ModuleNames:
    """The module that is running, in forward and in backward, and the names of parameters.

    Attributes:
        stacks: Names of the lists of blocks.
        parameter: The parameter for which state is created; empty otherwise.
    """

    def __init__(self) -> None:
        self.stacks: tuple[str, ...] = ()
        self.parameter = ""
        self._running: list[str] = []
        self._parameters: dict[int, str] = {}
        # the module that runs from each autograd sequence number on: a backward node has the number of its forward
        self._numbers: list[int] = []
        self._modules: list[str] = []

    def watch(self, model: torch.nn.Module) -> None:
        """Learn the names of a model's parameters, and follow its modules from now on."""
        stacks = stacks_of(model)
        self.stacks = tuple(name for name, _ in stacks)
        blocks = {f"{name}.{number}" for name, blocks in stacks for number in _keys(model, name, blocks)}
        for name, module in model.named_modules():
            _follow(module, _relative(name, blocks), self)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._parameters[id(tensor)] = _relative(name, blocks)

    def of_parameter(self, tensor: torch.Tensor) -> str:
        """The name of a parameter or buffer; empty for other tensors."""
        return self._parameters.get(id(tensor), "")

    def running(self) -> str:
        """The module whose forward or backward is running; empty outside the model."""
        if self.parameter or self._running:
            return self.parameter or self._running[-1]
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        position = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._modules[position] if position >= 0 else ""

    def enter(self, name: str) -> None:
        """Record that the forward of a module starts."""
        self._running.append(name)
        self._note()

    def leave(self) -> None:
        """Record that the forward of a module ends."""
        if self._running:
            self._running.pop()
        self._note()

    def _note(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._modules.append(self._running[-1] if self._running else "")


def full_name(name: str, stack: str | None, block: int | None) -> str:
    """The name of a module or parameter in the whole model.

    Args:
        name: A name from `ModuleNames`.
        stack: The list of blocks that it belongs to; None for none.
        block: The number of its block.
    """
    if stack is None:
        return name.removeprefix(".")
    return f"{stack}.{block}{name}".removesuffix(".") if not name or name.startswith(".") else name


def _keys(model: torch.nn.Module, stack: str, blocks: Sequence[torch.nn.Module]) -> list[str]:
    """The names of blocks within their list."""
    wanted = set(map(id, blocks))
    children: Mapping[str, torch.nn.Module] = dict(model.get_submodule(stack).named_children())
    return [name for name, child in children.items() if id(child) in wanted]


def _relative(name: str, blocks: set[str]) -> str:
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        if ".".join(parts[:length]) in blocks:
            return "." + ".".join(parts[length:])
    return name


def _follow(module: torch.nn.Module, name: str, names: ModuleNames) -> None:
    def before(module: torch.nn.Module, args: Any) -> None:
        names.enter(name)

    def after(module: torch.nn.Module, args: Any, output: Any) -> None:
        names.leave()

    module.register_forward_pre_hook(passive(before))
    module.register_forward_hook(passive(after), always_call=True)  # recomputation ends with an exception
