"""Values of traced tensors that follow from the example batch, so that data-dependent code runs as in a real step.

`meta` tensors have no data, but a forward pass reads some: where a mask is set, how many tokens of a kind there are,
the largest index. The values of the example batch are known (`example_batch.py`). For tensors computed only from known
ones, the operations are recorded, and the values are computed on the host when something reads them. Values that depend
on weights are unknown, with one exception: indices that a model chooses by scores (`argmax`, `topk`) are assumed to be
balanced, as those of a trained router are.
"""

import contextlib
import weakref
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.planner.trace.cache import tensors_in
from trimtab.planner.trace.deferred_values import Content, NotKnown, Operation, View

aten = torch.ops.aten
# These read only the shape of their argument: the number that they fill a tensor with, or its position.
_FILLS: dict[Any, tuple[int | None, int]] = {
    **dict.fromkeys((aten.zeros_like, aten.new_zeros), (None, 0)),
    **dict.fromkeys((aten.ones_like, aten.new_ones), (None, 1)),
    **dict.fromkeys((aten.full_like,), (1, 0)),
    **dict.fromkeys((aten.new_full,), (2, 0)),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.empty_strided), (None, 0)),
    **dict.fromkeys((aten.new_empty, aten.new_empty_strided), (None, 0)),
}
_CHOICES = {aten.argmax: (1, None), aten.topk: (2, -1), aten.max: (1, None)}  # position and default of `dim`


class KnownValues:
    """Tensors on `meta` whose values are known, by storage, so that views share them."""

    def __init__(self) -> None:
        self._contents: dict[int, Content] = {}
        self._num_choices = 0

    def tell(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Record the values of a tensor, unless it is too large."""
        with _disable_current_modes():  # the host's work is not part of the step
            content = Content(tensor, Operation(aten.clone.default, [values], {}), 0)
            if content.is_small:
                content.values()
                self._record(tensor, content)

    def enter_block(self) -> None:
        """Start a pass of a block: equal blocks make equal choices."""
        self._num_choices = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the values of a tensor; None if unknown."""
        with _disable_current_modes(), contextlib.suppress(NotKnown):
            view = self._view(tensor)
            return view if isinstance(view, torch.Tensor) else view.values()
        return None

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation without side effects on the values of its arguments.

        Raises:
            NotKnown: Some values are unknown.
        """
        return Operation(func, self._views(args), self._views(kwargs)).run()

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record how the results of an operation on `meta`, and the tensors it changed, follow from known values."""
        tensors = tensors_in([*args, *kwargs.values()] if kwargs else args)
        addresses = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.is_meta}
        packet = func._overloadpacket
        is_unknown = addresses and self._contents.keys().isdisjoint(addresses)  # it looks up a few addresses
        if is_unknown and packet not in _FILLS and packet not in _CHOICES:
            return  # most operations
        changed = [x for x in tensors_in([args[index] for index in written(func) if index < len(args)]) if x.is_meta]
        outs = tensors_in(out)
        if not changed and all(x.untyped_storage()._cdata in addresses for x in outs):  # views
            return
        if packet in _FILLS:
            self._fill(args, *_FILLS[packet], outs[0])
        elif addresses <= self._contents.keys() and torch.Tag.nondeterministic_seeded not in func.tags:
            self._compute_later(func, args, kwargs, outs, changed, addresses)
        elif changed:
            self._forget(changed)
        elif packet in _CHOICES:
            self._choose(args, kwargs, *_CHOICES[packet], outs[-1])

    def _compute_later(self, func: Any, args: Any, kwargs: Any, outs: Any, changed: Any, addresses: set[int]) -> None:
        try:
            before = [self._view(tensor) for tensor in changed]
            operation = Operation(func, self._views(args), self._views(kwargs), [view.content for view in before])
        except NotKnown:  # of another dtype than its storage
            self._forget(changed)
            return
        for index, tensor in enumerate(outs):
            if tensor.is_meta and tensor.untyped_storage()._cdata not in addresses:
                self._record(tensor, Content(tensor, operation, index))
        for tensor, view in zip(changed, before, strict=True):
            self._record(tensor, Content(tensor, operation, view.content))

    def _fill(self, args: Any, position: int | None, number: Any, made: torch.Tensor) -> None:
        if made.is_meta and not made.is_floating_point():  # others are gradients, or results of the model
            number = number if position is None else args[position]
            filled = Operation(aten.full.default, [made.shape, number], {"dtype": made.dtype})
            self._record(made, Content(made, filled, 0))

    def _choose(
        self, args: Any, kwargs: dict[str, Any], position: int, default: int | None, made: torch.Tensor
    ) -> None:
        """Record balanced choices: consecutive rows of scores choose consecutive candidates.

        Another choice in the same pass of a block starts at another candidate, because a router never chooses an expert
        twice.
        """
        scores = args[0]
        dim = kwargs.get("dim", args[position] if len(args) > position else default)
        if dim is None or not scores.is_floating_point() or not made.numel():
            return
        keeps_dim = made.dim() == scores.dim()
        shape = made.movedim(dim, -1).shape if keeps_dim else made.shape
        ranks = torch.arange(self._num_choices, self._num_choices + made.numel()).remainder(scores.shape[dim])
        self._num_choices += shape[-1] if keeps_dim else 1
        chosen = ranks.view(shape)
        self.tell(made, chosen.movedim(-1, dim) if keeps_dim else chosen)

    def _forget(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._contents.pop(tensor.untyped_storage()._cdata, None)

    def _record(self, tensor: torch.Tensor, content: Content) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._contents:
            weakref.finalize(storage, self._contents.pop, storage._cdata, None).atexit = False
        self._contents[storage._cdata] = content

    def _view(self, tensor: torch.Tensor) -> Any:
        if not tensor.is_meta:
            return tensor
        content = self._contents.get(tensor.untyped_storage()._cdata)
        if content is None or content.dtype != tensor.dtype:
            raise NotKnown
        return View(content, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _views(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._view(value)
        if isinstance(value, dict):
            return {name: self._views(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._views(item) for item in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value


@cache
def written(func: Any) -> list[int]:
    """Positions of the arguments that an operation changes in place."""
    arguments = func._schema.arguments
    return [index for index, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]
