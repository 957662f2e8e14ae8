"""Typed encoding of state as JSON and tensors: decoding returns exactly what was encoded, or raises.

`encode` turns any nesting of plain values into a JSON tree and named tensors; `decode` turns them back. Nothing is
pickled, so reading a checkpoint runs no code from it. Nothing is coerced: tuples stay tuples, integer keys stay
integers, infinities survive. A value without an exact encoding is refused, and the error names its path.

JSON's own types represent themselves; every other value is an object whose key "$" names its kind.
"""

import base64
import math
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from trimtab.checkpoint.tensor_file import WRITABLE_DTYPES
from trimtab.errors import CheckpointError

Tree = Any
_KIND = "$"
_MAX_JSON_BITS = 64  # Python refuses to convert very long integers to and from decimal text


@dataclass
class Encoded:
    """A JSON tree and the tensors that it refers to by name."""

    tree: Tree
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(value: Any) -> Encoded:
    """Encode a value; a storage that several tensors share is written once."""
    encoder = _Encoder()
    try:
        tree = encoder.encode(value, "")
    except RecursionError:
        raise CheckpointError(
            "the state contains itself, or is nested too deeply", "store plain values in it"
        ) from None
    return Encoded(tree, encoder.tensors_by_name())


def decode(tree: Tree, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Decode a tree into the value that was encoded.

    Args:
        tree: The tree that `encode` returned, after a round trip through JSON.
        tensor: Returns the tensor of a name. Each tensor is copied into new memory with torch's alignment, because the
            alignment of a memory-mapped file can change the last bit of a sum.
    """
    return _Decoder(tensor).decode(tree)


def entries(tree: Tree) -> dict[Any, Tree]:
    """Return the trees in an encoded dict by key, which allows decoding the values one at a time."""
    if isinstance(tree, dict) and _KIND not in tree:
        return tree
    if isinstance(tree, dict) and tree[_KIND] == "dict":
        return {decode(key, _refuse_tensor): item for key, item in tree["pairs"]}
    raise TypeError(f"expected an encoded dict, found {str(tree)[:40]!r}")


def _refuse_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"the tensor {name!r} is the key of an encoded dict", "use numbers or text as keys")


def is_tensor(tree: Tree) -> bool:
    """Whether a tree represents one tensor, of any kind."""
    return isinstance(tree, dict) and tree.get(_KIND) in ("tensor", "sparse", "subclass")


def dtype_and_shape(tree: Tree) -> tuple[str, list[int]] | None:
    """Return the dtype and shape of an encoded plain tensor without reading it; None for any other value."""
    if isinstance(tree, dict) and tree.get(_KIND) == "tensor":
        return tree["dtype"], tree["shape"]
    return None


def stored_shapes(tree: Tree) -> Iterator[tuple[str, list[int] | None]]:
    """Yield the name of every tensor that a tree refers to, with its shape in the file if the tree determines it."""
    if isinstance(tree, dict) and tree.get(_KIND) == "tensor":
        yield tree["name"], None if "view" in tree else tree["shape"]
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from stored_shapes(item)


@dataclass
class _View:
    """One occurrence of a tensor in the value, and the tree node that represents it."""

    name: str
    tensor: torch.Tensor
    node: dict[str, Any]


class _Encoder:
    def __init__(self) -> None:
        self._views: dict[tuple[str, int], list[_View]] = {}  # by storage

    def encode(self, value: Any, path: str) -> Tree:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            return value if value.bit_length() <= _MAX_JSON_BITS else {_KIND: "int", "value": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if kind is list:
            return self._items(value, path)
        if kind is dict and all(type(key) is str and not key.startswith(_KIND) for key in value):
            return {key: self.encode(item, _below(path, key)) for key, item in value.items()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in _SEQUENCES:
            return {_KIND: _SEQUENCES[kind], "items": self._items(list(value), path)}
        if kind in _MAPPINGS:
            return {_KIND: _MAPPINGS[kind], "pairs": self._pairs(value, path)}
        if kind is defaultdict and any(value.default_factory is factory for factory in _FACTORIES):
            factory = _FACTORIES[value.default_factory]
            return {_KIND: "defaultdict", "factory": factory, "pairs": self._pairs(value, path)}
        if kind is deque:
            return {_KIND: "deque", "maxlen": value.maxlen, "items": self._items(list(value), path)}
        return self._scalar(value, path)

    def _items(self, values: list[Any], path: str) -> list[Tree]:
        return [self.encode(item, _below(path, index)) for index, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Tree]:
        return [
            [self.encode(key, _below(path, "key")), self.encode(item, _below(path, key))] for key, item in value.items()
        ]

    def _scalar(self, value: Any, path: str) -> Tree:
        kind = type(value)
        if kind in _SCALARS:
            name, to_text = _SCALARS[kind]
            return {_KIND: name, "value": to_text(value)}
        if kind is complex:
            return {_KIND: "complex", "value": [self.encode(value.real, path), self.encode(value.imag, path)]}
        if _is_plain_numpy(value):
            return {
                _KIND: "numpy",
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "scalar": kind is not sys.modules["numpy"].ndarray,
                "value": _to_base64(value.tobytes()),
            }
        raise CheckpointError(
            f"the value at {path or 'the top'!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            "store only numbers, text, tensors and containers of these in a state_dict, no functions or other objects",
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Tree:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter:
            names, context = tensor.__tensor_flatten__()
            return {
                _KIND: "subclass",
                "class": f"{type(tensor).__module__}:{type(tensor).__qualname__}",
                "parts": {name: self.encode(getattr(tensor, name), _below(path, name)) for name in names},
                "context": self.encode(context, path),
                "shape": self.encode(list(tensor.shape), path),
                "stride": self.encode(list(tensor.stride()), path),
            }
        problem = _tensor_problem(tensor)
        if problem:
            raise CheckpointError(
                f"the tensor at {path or 'the top'!r} {problem}, so it cannot be saved",
                "store only plain tensors in the state",
            )
        tensor = tensor.detach()
        if tensor.layout is torch.sparse_coo:
            return {
                _KIND: "sparse",
                "indices": self._tensor(tensor._indices(), _below(path, "indices")),
                "values": self._tensor(tensor._values(), _below(path, "values")),
                "shape": list(tensor.shape),
                "coalesced": tensor.is_coalesced(),
            }
        tensor = tensor.resolve_conj().resolve_neg()  # conjugation is a lazy flag that the bytes do not contain
        node: dict[str, Any] = {_KIND: "tensor", "dtype": _dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        storage = tensor.untyped_storage()
        # storages are identified by address; empty ones have none, so each counts as a separate storage
        key = (str(tensor.device), storage.data_ptr() or -id(storage) - len(self._views))
        self._views.setdefault(key, []).append(_View(path or "value", tensor, node))
        return node

    def tensors_by_name(self) -> dict[str, torch.Tensor]:
        """Name the tensors to write and complete the nodes that refer to them.

        A storage is written as one tensor if all its views are equal, else as the bytes that the views span.
        """
        tensors: dict[str, torch.Tensor] = {}
        for views in self._views.values():
            first = views[0]
            name = _unused(first.name, tensors)
            if first.tensor.dtype in WRITABLE_DTYPES and all(_same_view(first.tensor, view.tensor) for view in views):
                tensors[name] = first.tensor
                for view in views:
                    view.node["name"] = name
                continue
            begin, tensors[name] = _bytes_spanned([view.tensor for view in views])
            for view in views:
                offset = view.tensor.storage_offset() - begin // view.tensor.element_size()
                view.node.update(name=name, view={"stride": list(view.tensor.stride()), "offset": offset})
        return tensors


def _below(path: str, key: Any) -> str:
    """Return the path of an item; a key without short text is represented by its type."""
    is_short = type(key) in (str, bool) or (type(key) is int and key.bit_length() <= _MAX_JSON_BITS)
    step = str(key) if is_short else type(key).__name__
    return f"{path}.{step}" if path else step


def _is_plain_numpy(value: Any) -> bool:
    """Whether this is an array of numbers or a NumPy number; matrices, masked and memory-mapped arrays are not."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return type(value).__module__ == "numpy" and value.dtype.kind in "biufc"


def _tensor_problem(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no __tensor_flatten__"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"has the layout {tensor.layout}"
    if tensor.device.type == "meta":
        return "has no data (it is on the meta device)"
    if tensor.dtype not in WRITABLE_DTYPES | _WRITTEN_AS_BYTES:
        return f"has the dtype {tensor.dtype}"
    return ""


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """Return a name that no tensor has yet and that the file can contain: UTF-8, and not safetensors' own key."""
    name = name.encode(errors="replace").decode()
    candidate, number = name, 1
    while candidate in taken or candidate == "__metadata__":
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    views = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
    return views[0] == views[1]


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _bytes_spanned(tensors: list[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Return the range of a storage that several tensors view: its offset in bytes, and the bytes."""
    ranges = [_byte_range(tensor) for tensor in tensors]
    # multiples of 16 bytes, so that elements of any size can view the range
    begin, end = min(r[0] for r in ranges) // 16 * 16, -(-max(r[1] for r in ranges) // 16) * 16
    # torch can know memory from outside, such as NumPy's, as several storages with one address
    storage = max((tensor.untyped_storage() for tensor in tensors), key=lambda storage: storage.nbytes())
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)
    spanned = whole[begin:end]
    return begin, torch.nn.functional.pad(spanned, (0, end - begin - spanned.numel()))


def _to_base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is not a dtype")
    return dtype


# safetensors has no name for these dtypes, or not in every version, or defines their shape differently
_WRITTEN_AS_BYTES = {
    *(torch.complex32, torch.complex128, torch.float4_e2m1fn_x2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
_SEQUENCES: dict[Any, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordereddict", Counter: "counter"}
_FACTORIES: dict[Any, str | None] = {dict: "dict", list: "list", int: "int", float: "float", None: None}
_SCALARS: dict[Any, tuple[str, Callable[[Any], str]]] = {
    bytes: ("bytes", _to_base64),
    bytearray: ("bytearray", _to_base64),
    torch.dtype: ("dtype", _dtype_name),
    torch.device: ("device", str),
    type(pathlib.Path()): ("path", str),
}
_SCALAR_OF: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float,
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "dtype": _dtype_of,
    "device": torch.device,
    "path": pathlib.Path,
}
_CONTAINER_OF = {name: kind for kind, name in {**_SEQUENCES, **_MAPPINGS}.items()}
_FACTORY_OF = {name: kind for kind, name in _FACTORIES.items()}


class _Decoder:
    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._load = tensor
        self._loaded: dict[str, torch.Tensor] = {}

    def decode(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.decode(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if _KIND not in tree:
            return {key: self.decode(item) for key, item in tree.items()}
        kind = tree[_KIND]
        try:
            return self._special(kind, tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise CheckpointError(
                f"a saved value of kind {kind!r} cannot be read ({error})", "load an older checkpoint"
            ) from error

    def _special(self, kind: str, tree: dict[str, Any]) -> Any:
        if kind == "tensor":
            return self._tensor(tree)
        if kind == "subclass":
            return self._subclass(tree)
        if kind == "sparse":
            parts = (self.decode(tree["indices"]), self.decode(tree["values"]), tree["shape"])
            return torch.sparse_coo_tensor(*parts, is_coalesced=tree["coalesced"], check_invariants=True)
        if kind in _CONTAINER_OF:
            return _CONTAINER_OF[kind](self.decode(tree["items"]) if "items" in tree else self._pairs(tree))
        if kind == "defaultdict":
            return defaultdict(_FACTORY_OF[tree["factory"]], self._pairs(tree))
        if kind == "deque":
            return deque(self.decode(tree["items"]), tree["maxlen"])
        if kind in _SCALAR_OF:
            return _SCALAR_OF[kind](tree["value"])
        if kind == "complex":
            return complex(self.decode(tree["value"][0]), self.decode(tree["value"][1]))
        if kind == "numpy":
            import numpy

            raw = numpy.frombuffer(base64.b64decode(tree["value"]), dtype=numpy.dtype(tree["dtype"]))
            array = raw.reshape(tree["shape"])
            return array[()] if tree["scalar"] else array.copy()
        raise CheckpointError(f"a saved value is of kind {kind!r}, which this version does not know", "upgrade trimtab")

    def _pairs(self, tree: dict[str, Any]) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in tree["pairs"]}

    def _tensor(self, tree: dict[str, Any]) -> torch.Tensor:
        name = tree["name"]
        if name not in self._loaded:
            self._loaded[name] = self._load(name).clone()
        tensor = self._loaded[name]
        if "view" in tree:
            view = tree["view"]
            typed = tensor.view(_dtype_of(tree["dtype"]))
            return typed.as_strided(tree["shape"], view["stride"], view["offset"])
        return tensor

    def _subclass(self, tree: dict[str, Any]) -> torch.Tensor:
        module, _, qualname = tree["class"].partition(":")
        # Only classes that the program has imported itself: a checkpoint must not trigger an import.
        kind: Any = sys.modules.get(module)
        for part in qualname.split("."):
            kind = getattr(kind, part, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
            raise CheckpointError(
                f"the checkpoint contains a tensor of class {tree['class']}, which is not imported here",
                f"import {module.partition('.')[0]} and prepare the same model and optimizer before load_state",
            )
        parts = {name: self.decode(part) for name, part in tree["parts"].items()}
        context = self.decode(tree["context"])
        size, stride = torch.Size(tree["shape"]), tuple(tree["stride"])
        value: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
        return value
