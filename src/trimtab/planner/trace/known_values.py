"""Values of tensors in a trace that follow from the example batch, so that what depends on data is as in a real step.

`meta` tensors have no data, but a forward pass reads some: where a mask is set, how many tokens of a kind there are,
the largest index. The values of the example batch are known (`example_batch.py`). For tensors that follow from known
ones alone it is recorded how, and they are computed on the host when something reads them. Nothing that depends on
weights is known, with one exception: indices that a model chooses by scores (`argmax`, `topk`) are assumed to be
balanced, as those of a trained router are.
"""

import contextlib
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trimtab.planner.trace.cache import tensors_in

aten = torch.ops.aten
_MOST = 2**27  # numbers of a tensor that is computed
_DEEPEST = 100  # operations to be computed at once
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
# These read nothing of their arguments but a shape: the number that they fill a tensor with, or its position.
_FILLS: dict[Any, tuple[int | None, int]] = {
    **dict.fromkeys((aten.zeros_like, aten.new_zeros), (None, 0)),
    **dict.fromkeys((aten.ones_like, aten.new_ones), (None, 1)),
    **dict.fromkeys((aten.full_like,), (1, 0)),
    **dict.fromkeys((aten.new_full,), (2, 0)),
    **dict.fromkeys((aten.empty, aten.empty_like, aten.empty_strided), (None, 0)),
    **dict.fromkeys((aten.new_empty, aten.new_empty_strided), (None, 0)),
}
_CHOICES = {aten.argmax: (1, None), aten.topk: (2, -1), aten.max: (1, None)}  # position and default of `dim`


class NotKnown(Exception):  # noqa: N818 (a trace goes on without the values)
    """The values of a tensor cannot be computed."""


class KnownValues:
    """Tensors on `meta` whose values are known, by storage, so that views share them."""

    def __init__(self) -> None:
        self._contents: dict[int, _Content] = {}
        self._num_choices = 0

    def tell(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Record the values of a tensor."""
        with _disable_current_modes():  # the host's work is not part of the step
            content = _Content(tensor, _Operation(aten.clone.default, [values], {}), 0)
            content.values()
        self._record(tensor, content)

    def enter_block(self) -> None:
        """Start a pass of a block: like blocks make like choices."""
        self._num_choices = 0

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; None if they are not known."""
        with _disable_current_modes(), contextlib.suppress(NotKnown):
            view = self._view(tensor)
            return view if isinstance(view, torch.Tensor) else view.on(view.content.values())
        return None

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation that changes nothing on the values of its arguments.

        Raises:
            NotKnown: Some are not known.
        """
        return _Operation(func, self._views(args), self._views(kwargs)).run()

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Record how the results of an operation on `meta`, and what it changed, follow from known values."""
        tensors = tensors_in([*args, *kwargs.values()] if kwargs else args)
        addresses = {tensor.untyped_storage()._cdata for tensor in tensors if tensor.is_meta}
        packet = func._overloadpacket
        if addresses and addresses.isdisjoint(self._contents) and packet not in _FILLS and packet not in _CHOICES:
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
            operation = _Operation(func, self._views(args), self._views(kwargs), [view.content for view in before])
        except NotKnown:  # of another dtype than its storage
            self._forget(changed)
            return
        for index, tensor in enumerate(outs):
            if tensor.is_meta and tensor.untyped_storage()._cdata not in addresses:
                self._record(tensor, _Content(tensor, operation, index))
        for tensor, view in zip(changed, before, strict=True):
            self._record(tensor, _Content(tensor, operation, view.content))

    def _fill(self, args: Any, position: int | None, number: Any, made: torch.Tensor) -> None:
        if made.is_meta and not made.is_floating_point():  # others are gradients, or results of the model
            number = number if position is None else args[position]
            filled = _Operation(aten.full.default, [made.shape, number], {"dtype": made.dtype})
            self._record(made, _Content(made, filled, 0))

    def _choose(
        self, args: Any, kwargs: dict[str, Any], position: int, default: int | None, made: torch.Tensor
    ) -> None:
        """Record balanced choices: consecutive rows of scores choose consecutive candidates.

        Another choice in the same pass of a block starts elsewhere, because a router chooses no expert twice.
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

    def _record(self, tensor: torch.Tensor, content: "_Content") -> None:
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
        return _View(content, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _views(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._view(value)
        if isinstance(value, dict):
            return {name: self._views(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._views(item) for item in value]
        return torch.device("cpu") if isinstance(value, torch.device) else value


class _Operation:
    """An operation on known values. It runs once, when one of its results is read.

    Args:
        func: The operation.
        args, kwargs: Its arguments, with views in place of tensors on `meta`.
        changed: What it changes in place; it works on copies.
    """

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], changed: "list[_Content] | None" = None) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._copies: dict[_Content, torch.Tensor | None] = dict.fromkeys(changed or [])
        self._results: list[torch.Tensor] | None = None
        contents = [view.content for view in _views_in([*args, *kwargs.values()])]
        self.depth: int = 1 + max((content.depth for content in contents), default=0)

    def run(self) -> Any:
        """Run it, and return what it returns.

        Raises:
            NotKnown: It does not run on the host, or its arguments cannot be computed.
        """
        for content in self._copies:
            self._copies[content] = content.values().clone()
        try:
            return self._func(*self._on_host(self._args), **self._on_host(self._kwargs))
        except _FAILURES as error:
            raise NotKnown from error

    def result(self, which: "int | _Content") -> torch.Tensor:
        """One of the tensors that it returns, by number, or the whole storage of one that it changed."""
        if self._results is None:
            self._results = tensors_in(self.run())
            self._args, self._kwargs = [], {}
        copy = None if isinstance(which, int) else self._copies[which]
        return self._results[which] if copy is None else copy  # type: ignore[index]

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, _View):
            copy = self._copies.get(value.content)
            return value.on(value.content.values() if copy is None else copy)
        if isinstance(value, dict):
            return {name: self._on_host(item) for name, item in value.items()}
        return [self._on_host(item) for item in value] if isinstance(value, list) else value


class _Content:
    """The known content of a storage.

    Args:
        tensor: A tensor on `meta` that uses the whole storage, or views it.
        operation: What computes it.
        which: The result of the operation; see `_Operation.result`.
    """

    def __init__(self, tensor: torch.Tensor, operation: _Operation, which: "int | _Content") -> None:
        self.dtype = tensor.dtype
        self.depth: int = operation.depth
        self._size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._operation: _Operation | None = operation
        self._which = which
        self._values: torch.Tensor | None = None
        if self.depth > _DEEPEST:  # a long chain would exceed Python's stack
            with contextlib.suppress(NotKnown):
                self.values()

    def values(self) -> torch.Tensor:
        """The content, flat.

        Raises:
            NotKnown: It cannot be computed.
        """
        if self._values is None:
            if self._operation is None or self._size > _MOST:
                raise NotKnown
            operation, self._operation = self._operation, None
            found = operation.result(self._which)
            if isinstance(self._which, int):
                flat = torch.zeros(self._size, dtype=self.dtype)
                flat.as_strided(*self._layout).copy_(found)
                found = flat
            self._values, self.depth = found, 0
        return self._values


class _View(NamedTuple):
    """A tensor as a view of a content."""

    content: _Content
    shape: Any
    stride: Any
    offset: Any

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.as_strided(self.shape, self.stride, self.offset)


def _views_in(value: Any) -> list[_View]:
    if isinstance(value, _View):
        return [value]
    return [view for item in value for view in _views_in(item)] if isinstance(value, list) else []


@cache
def written(func: Any) -> list[int]:
    """Positions of the arguments that an operation changes in place."""
    arguments = func._schema.arguments
    return [index for index, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write]
