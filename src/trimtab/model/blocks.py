"""Find the repeated blocks (transformer layers) of a model."""

from collections.abc import Callable, Iterator

from torch import nn


def blocks_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The repeated blocks of a model with their names, in the order of the model (encoder before decoder).

    Blocks are subclasses of transformers' `GradientCheckpointingLayer`, or else the items of lists of equal modules.
    """
    return list(_outermost(model, _is_marked)) or list(_outermost_items(model))


def stacks_of(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """The lists of blocks of a model, by name; empty if it has none."""
    stacks: dict[str, list[nn.Module]] = {}
    for name, block in blocks_of(model):
        stacks.setdefault(name.rpartition(".")[0], []).append(block)
    return list(stacks.items())


def _is_marked(module: nn.Module) -> bool:
    """Whether a module is a `GradientCheckpointingLayer`; by name, so custom models do not import transformers."""
    return any(parent.__name__ == "GradientCheckpointingLayer" for parent in type(module).__mro__)


def _outermost(
    module: nn.Module, is_wanted: Callable[[nn.Module], bool], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if is_wanted(child):
            yield prefix + name, child
        else:
            yield from _outermost(child, is_wanted, f"{prefix}{name}.")


def _outermost_items(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The items of lists of equal modules, for models without `GradientCheckpointingLayer`s."""
    for name, stack in _outermost(model, _is_stack):
        for number, block in stack.named_children():
            yield f"{name}.{number}", block


def _is_stack(module: nn.Module) -> bool:
    items = list(module.children())
    is_list = isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(items) > 1)
    # blocks contain other modules: the items of a list of single Linear modules do not
    return is_list and len({type(item) for item in items}) == 1 and any(items[0].children())
