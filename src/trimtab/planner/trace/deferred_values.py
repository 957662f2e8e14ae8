"""Operations on the host that are executed only when one of their results is read; see `known_values.py`.

Tensors up to a certain size are computed as a whole. For larger ones, such as the attention mask of long rows, only the
part that is read is computed, through elementwise operations.
"""

import contextlib
from typing import Any, NamedTuple

import torch

from trimtab.planner.trace.cache import tensors_in

aten = torch.ops.aten
_MOST = 2**22  # maximum number of elements of a tensor, or a part of one, to compute
_DEEPEST = 100  # maximum number of operations to compute together
_FAILURES = (RuntimeError, ValueError, TypeError, IndexError)


class NotKnown(Exception):  # noqa: N818 (a trace continues without the values)
    """The values of a tensor cannot be computed."""


class Operation:
    """An operation on known values.

    Args:
        func: The operation.
        args: Its arguments, with a `View` instead of each tensor on `meta`.
        kwargs: Its arguments by name.
        changed: The tensors that it changes in place; it works on copies.
    """

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any], changed: "list[Content] | None" = None) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._changed = set(changed or [])
        self._copies: dict[Content, torch.Tensor] = {}  # copies of whole storages
        self._parts: dict[Content, tuple[View, torch.Tensor]] = {}  # parts of storages that are too large
        self._results: list[torch.Tensor] | None = None
        contents = [view.content for view in _views_in([*args, *kwargs.values()])]
        self.depth: int = 1 + max((content.depth for content in contents), default=0)

    def run(self) -> Any:
        """Run it and return its result.

        Raises:
            NotKnown: It does not run on the host, or its arguments cannot be computed.
        """
        self._copies = {content: content.values().clone() for content in self._changed if content.is_small}
        try:
            return self._func(*self._on_host(self._args), **self._on_host(self._kwargs))
        except _FAILURES as error:
            raise NotKnown from error

    def result(self, number: int) -> torch.Tensor:
        """Return one of the tensors that it returns."""
        return self._run_once()[number]

    def copy_of(self, content: "Content") -> torch.Tensor:
        """Return the whole storage of a tensor that it changed."""
        self._run_once()
        return self._copies[content]

    def part_of(self, content: "Content") -> "tuple[View, torch.Tensor]":
        """Return the part that it changed in a storage that is too large."""
        self._run_once()
        return self._parts[content]

    def at(self, offsets: torch.Tensor, layout: "tuple[Any, Any, Any]") -> torch.Tensor:
        """Return some elements of its result.

        Args:
            offsets: Their offsets in its storage.
            layout: Its shape, strides and offset.

        Raises:
            NotKnown: It is not an elementwise operation.
        """
        is_pointwise = torch.Tag.pointwise in self._func.tags or self._func._overloadpacket is aten._to_copy
        if self._changed or not is_pointwise:
            raise NotKnown
        shape, strides, first = layout
        rest, indices = offsets - first, {}
        for dim in sorted(range(len(shape)), key=lambda dim: -strides[dim]):
            if shape[dim] > 1:
                indices[dim - len(shape)] = rest // strides[dim]
                rest = rest % strides[dim]

        def part(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim():
                raise NotKnown
            if not isinstance(value, View):
                return value
            places = torch.full_like(offsets, value.offset)
            for dim, index in indices.items():
                if -dim <= len(value.shape) and value.shape[dim] != 1:
                    places += index * value.stride[dim]
            return value.content.at(places)

        kwargs = {name: part(value) for name, value in self._kwargs.items()}
        found: torch.Tensor = self._func(*map(part, self._args), **kwargs)
        return found

    def _run_once(self) -> list[torch.Tensor]:
        if self._results is None:
            self._results = tensors_in(self.run())
            self._args, self._kwargs = [], {}
        return self._results

    def _on_host(self, value: Any) -> Any:
        if isinstance(value, View):
            return self._argument(value)
        if isinstance(value, dict):
            return {name: self._on_host(item) for name, item in value.items()}
        return [self._on_host(item) for item in value] if isinstance(value, list) else value

    def _argument(self, view: "View") -> torch.Tensor:
        if view.content not in self._changed:
            return view.values()
        if view.content in self._copies:
            return view.on(self._copies[view.content])
        if view.content in self._parts:  # two parts might overlap
            raise NotKnown
        part = view.values().clone()
        self._parts[view.content] = view, part
        return part


class Content:
    """The known content of a storage.

    Args:
        tensor: A tensor on `meta` that is, or views, the storage.
        operation: The operation that computes it.
        which: The index of the result, or the content before the operation changed it.
    """

    def __init__(self, tensor: torch.Tensor, operation: Operation, which: "int | Content") -> None:
        self.dtype = tensor.dtype
        self.depth: int = operation.depth
        self._size = tensor.untyped_storage().nbytes() // tensor.element_size()
        self._layout = tensor.shape, tensor.stride(), tensor.storage_offset()
        self._operation: Operation | None = operation
        self._which = which
        self._values: torch.Tensor | None = None
        if self.depth > _DEEPEST and self.is_small:  # a long chain would exceed Python's stack
            with contextlib.suppress(NotKnown):
                self.values()

    @property
    def is_small(self) -> bool:
        """Whether it is small enough to be computed as a whole."""
        return self._size <= _MOST

    def values(self) -> torch.Tensor:
        """Return the whole content, flat.

        Raises:
            NotKnown: It cannot be computed.
        """
        if self._values is None:
            if self._operation is None or not self.is_small:
                raise NotKnown
            operation, self._operation = self._operation, None
            if isinstance(self._which, int):
                self._values = torch.zeros(self._size, dtype=self.dtype)
                self._values.as_strided(*self._layout).copy_(operation.result(self._which))
            else:
                self._values = operation.copy_of(self._which)
            self.depth = 0
        return self._values

    def at(self, offsets: torch.Tensor) -> torch.Tensor:
        """Return the elements at some offsets of the storage.

        Raises:
            NotKnown: They cannot be computed.
        """
        if self.is_small:
            return self.values()[offsets]
        assert self._operation is not None
        if isinstance(self._which, int):
            return self._operation.at(offsets, self._layout)
        view, part = self._operation.part_of(self._which)
        places, order = view.offsets().flatten().sort()
        near = torch.searchsorted(places, offsets).clamp(max=len(places) - 1)
        return torch.where(places[near] == offsets, part.flatten()[order][near], self._which.at(offsets))


class View(NamedTuple):
    """A tensor as a view of a content."""

    content: Content
    shape: Any
    stride: Any
    offset: Any

    def values(self) -> torch.Tensor:
        """The values of the tensor.

        Raises:
            NotKnown: They cannot be computed.
        """
        if self.content.is_small:
            return self.on(self.content.values())
        return self.content.at(self.offsets().flatten()).view(self.shape)

    def on(self, flat: torch.Tensor) -> torch.Tensor:
        """The same view of another storage."""
        return flat.as_strided(self.shape, self.stride, self.offset)

    def offsets(self) -> torch.Tensor:
        """The offset of each element in the storage.

        Raises:
            NotKnown: There are too many elements.
        """
        if self.shape.numel() > _MOST:
            raise NotKnown
        found = torch.tensor(self.offset)
        for size, stride in zip(self.shape, self.stride, strict=True):
            found = found.unsqueeze(-1) + torch.arange(size) * stride
        return found


def _views_in(value: Any) -> list[View]:
    if isinstance(value, View):
        return [value]
    return [view for item in value for view in _views_in(item)] if isinstance(value, list) else []
