"""State as JSON and tensors, with every type kept: what is read back is what was written, or it is an error.

`encode` turns any nesting of plain values into a JSON tree plus named tensors; `decode` turns them back. Nothing is
pickled, so reading a checkpoint runs no code of it; nothing is coerced, so tuples stay tuples, integer keys stay
integers and infinities survive. A value that has no faithful form is refused with its path.

JSON's own types stand for themselves; every other value is an object whose "$" names its kind.
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

from trimtab.errors import CheckpointError

Tree = Any
_KIND = "$"
_MAX_JSON_BITS = 64  # Python refuses to write or read very long decimal numbers


@dataclass
class Encoded:
    """A JSON tree and the tensors that it refers to by name."""

    tree: Tree
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)


def encode(value: Any) -> Encoded:
    """Turn `value` into a JSON tree and tensors; storages that several tensors share are written once."""
    encoder = _Encoder()
    try:
        tree = encoder.tree_of(value, "")
    except RecursionError:
        raise CheckpointError("the state contains itself, or is nested too deeply", "keep plain values in it") from None
    return Encoded(tree, encoder.tensors_by_name())


def decode(tree: Tree, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Turn a tree back into the value that was encoded.

    Args:
        tree: What `encode` gave, through JSON.
        tensor: Gives the tensor of a name. Each is copied into memory of its own, aligned as torch aligns it: the
            alignment of a mapped file can change the last bit of a sum.
    """
    return _Decoder(tensor).value_of(tree)


def entries(tree: Tree) -> dict[Any, Tree]:
    """The trees in a saved dict by their keys, so that its values can be decoded one at a time."""
    if isinstance(tree, dict) and _KIND not in tree:
        return tree
    if isinstance(tree, dict) and tree[_KIND] == "dict":
        return {decode(key, _no_tensor): item for key, item in tree["pairs"]}
    raise TypeError(f"{str(tree)[:40]!r} stands where a dict was saved")


def _no_tensor(name: str) -> torch.Tensor:
    raise CheckpointError(f"the tensor {name!r} is the key of a saved dict", "use numbers or text as keys")


def tensor_forms(tree: Tree) -> Iterator[tuple[str, list[int] | None]]:
    """The name of every tensor that a tree refers to, and the shape it was written in, where the tree knows it."""
    if isinstance(tree, dict) and tree.get(_KIND) == "tensor":
        yield tree["name"], None if "view" in tree else tree["shape"]
    elif isinstance(tree, dict | list):
        for item in tree.values() if isinstance(tree, dict) else tree:
            yield from tensor_forms(item)


@dataclass
class _View:
    """One tensor as it was met: its storage, how it looks into it, and the node of the tree that stands for it."""

    name: str
    tensor: torch.Tensor
    node: dict[str, Any]


class _Encoder:
    def __init__(self) -> None:
        self._views: dict[tuple[str, int], list[_View]] = {}  # by storage

    def tree_of(self, value: Any, path: str) -> Tree:
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
            return {key: self.tree_of(item, _below(path, key)) for key, item in value.items()}
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
        return [self.tree_of(item, _below(path, index)) for index, item in enumerate(values)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Tree]:
        return [
            [self.tree_of(key, _below(path, "key")), self.tree_of(item, _below(path, key))]
            for key, item in value.items()
        ]

    def _scalar(self, value: Any, path: str) -> Tree:
        kind = type(value)
        if kind is complex:
            return {
                _KIND: "complex",
                "value": [self.tree_of(value.real, path), self.tree_of(value.imag, path)],
            }
        if kind in (bytes, bytearray):
            return {_KIND: kind.__name__, "value": base64.b64encode(bytes(value)).decode()}
        if kind is torch.dtype:
            return {_KIND: "dtype", "value": _name_of(value)}
        if kind is torch.device:
            return {_KIND: "device", "value": str(value)}
        if kind is type(pathlib.Path()):
            return {_KIND: "path", "value": str(value)}
        if _is_plain_numpy(value):
            return {
                _KIND: "numpy",
                "dtype": value.dtype.str,
                "shape": list(value.shape),
                "scalar": kind is not sys.modules["numpy"].ndarray,
                "value": base64.b64encode(value.tobytes()).decode(),
            }
        raise CheckpointError(
            f"the value at {path or 'the top'!r} is a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            "keep numbers, text, tensors and containers of these in a state_dict; functions and objects are not state",
        )

    def _tensor(self, tensor: torch.Tensor, path: str) -> Tree:
        if hasattr(tensor, "__tensor_flatten__") and type(tensor) is not torch.nn.Parameter:
            names, context = tensor.__tensor_flatten__()
            return {
                _KIND: "subclass",
                "class": f"{type(tensor).__module__}:{type(tensor).__qualname__}",
                "parts": {name: self.tree_of(getattr(tensor, name), _below(path, name)) for name in names},
                "context": self.tree_of(context, path),
                "shape": self.tree_of(list(tensor.shape), path),
                "stride": self.tree_of(list(tensor.stride()), path),
            }
        unfit = _why_unfit(tensor)
        if unfit:
            raise CheckpointError(
                f"the tensor at {path or 'the top'!r} {unfit}, so it cannot be saved", "keep plain tensors in the state"
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
        tensor = tensor.resolve_conj().resolve_neg()  # a conjugate is a flag on a view, which bytes do not have
        node: dict[str, Any] = {_KIND: "tensor", "dtype": _name_of(tensor.dtype), "shape": list(tensor.shape)}
        storage = tensor.untyped_storage()
        # storages are told apart by address; empty ones have none, so their object is
        key = (str(tensor.device), storage.data_ptr() or -id(storage) - len(self._views))
        self._views.setdefault(key, []).append(_View(path or "value", tensor, node))
        return node

    def tensors_by_name(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for views in self._views.values():
            first = views[0]
            name = _unused(first.name, tensors)
            has_name_for_dtype = first.tensor.dtype not in _WRITTEN_AS_BYTES
            if has_name_for_dtype and all(_same_view(first.tensor, view.tensor) for view in views):
                tensors[name] = first.tensor
                for view in views:
                    view.node["name"] = name
                continue
            begin, flat = _bytes_spanned([view.tensor for view in views])
            tensors[name] = flat
            for view in views:
                view.node.update(name=name, view=_view_of(view.tensor, begin))
        return tensors


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_tensor(tree: Tree) -> bool:
    """Whether a tree stands for one tensor, of any kind."""
    return isinstance(tree, dict) and tree.get(_KIND) in ("tensor", "sparse", "subclass")


def tensor_form(tree: Tree) -> tuple[str, list[int]] | None:
    """The dtype and shape of a plain tensor in a tree, known without reading it; None for any other value."""
    if isinstance(tree, dict) and tree.get(_KIND) == "tensor":
        return tree["dtype"], tree["shape"]
    return None


def _below(path: str, key: Any) -> str:
    """The path of an item; keys that have no short text are named by their type."""
    step = str(key) if type(key) in (str, bool) or _is_short(key) else type(key).__name__
    return f"{path}.{step}" if path else step


def _is_short(key: Any) -> bool:
    return type(key) is int and key.bit_length() <= _MAX_JSON_BITS


def _is_plain_numpy(value: Any) -> bool:
    """Whether this is an array of numbers or one such number; matrices, masked and mapped arrays are more than that."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not (type(value) is numpy.ndarray or isinstance(value, numpy.generic)):
        return False
    return type(value).__module__ == "numpy" and value.dtype.kind in "biufc"


def _why_unfit(tensor: torch.Tensor) -> str:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(tensor).__module__}.{type(tensor).__qualname__}, which has no __tensor_flatten__"
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"has the layout {tensor.layout}"
    if tensor.device.type == "meta":
        return "has no data (it is on the meta device)"
    if tensor.dtype not in _WRITTEN_BY_NAME | _WRITTEN_AS_BYTES:
        return f"has the dtype {tensor.dtype}"
    return ""


def _unused(name: str, taken: Mapping[str, Any]) -> str:
    """A name that no tensor has yet, and that the file can hold: in UTF-8, and not the name of its own header."""
    name = name.encode(errors="replace").decode()
    candidate, number = name, 1
    while candidate in taken or candidate == "__metadata__":
        candidate, number = f"{name}#{number}", number + 1
    return candidate


def _same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    looks = [(t.dtype, t.shape, t.stride(), t.storage_offset()) for t in (a, b)]
    return looks[0] == looks[1]


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (int(last) + 1) * tensor.element_size()


def _bytes_spanned(tensors: list[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """The part of a storage that several tensors look into, as bytes, and where it begins."""
    ranges = [_byte_range(tensor) for tensor in tensors]
    # whole 16 bytes, so that the range can be seen in elements of any size
    begin, end = min(r[0] for r in ranges) // 16 * 16, -(-max(r[1] for r in ranges) // 16) * 16
    # memory that came from outside can be known to torch as several storages of one address
    storage = max((tensor.untyped_storage() for tensor in tensors), key=lambda storage: storage.nbytes())
    whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)
    spanned = whole[begin:end]
    return begin, torch.nn.functional.pad(spanned, (0, end - begin - spanned.numel()))


def _view_of(tensor: torch.Tensor, begin: int) -> dict[str, Any]:
    return {
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset() - begin // tensor.element_size(),
    }


_WRITTEN_BY_NAME = {
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
}
# safetensors has no names for these, or not in every version, or another idea of their shape
_WRITTEN_AS_BYTES = {
    *(torch.complex32, torch.complex128, torch.float4_e2m1fn_x2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
_SEQUENCES: dict[Any, str] = {tuple: "tuple", torch.Size: "size", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[Any, str] = {dict: "dict", OrderedDict: "ordereddict", Counter: "counter"}
_FACTORIES: dict[Any, str | None] = {dict: "dict", list: "list", int: "int", float: "float", None: None}
_BUILD = {name: kind for kind, name in {**_SEQUENCES, **_MAPPINGS}.items()}
_FACTORY_OF = {name: kind for kind, name in _FACTORIES.items()}


class _Decoder:
    def __init__(self, tensor: Callable[[str], torch.Tensor]) -> None:
        self._load = tensor
        self._loaded: dict[str, torch.Tensor] = {}

    def value_of(self, tree: Tree) -> Any:
        if isinstance(tree, list):
            return [self.value_of(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        if _KIND not in tree:
            return {key: self.value_of(item) for key, item in tree.items()}
        kind = tree[_KIND]
        try:
            return self._special(kind, tree)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise CheckpointError(
                f"a saved value of kind {kind!r} cannot be read ({error})", "take an older checkpoint"
            ) from error

    def _special(self, kind: str, tree: dict[str, Any]) -> Any:
        if kind == "tensor":
            return self._tensor(tree)
        if kind == "subclass":
            return self._subclass(tree)
        if kind == "sparse":
            parts = (self.value_of(tree["indices"]), self.value_of(tree["values"]), tree["shape"])
            return torch.sparse_coo_tensor(*parts, is_coalesced=tree["coalesced"], check_invariants=True)
        if kind in _BUILD and "items" in tree:
            return _BUILD[kind](self.value_of(tree["items"]))
        if kind in _BUILD:
            return _BUILD[kind](self._pairs(tree))
        if kind == "defaultdict":
            return defaultdict(_FACTORY_OF[tree["factory"]], self._pairs(tree))
        if kind == "deque":
            return deque(self.value_of(tree["items"]), tree["maxlen"])
        return _scalar_of(kind, tree, self)

    def _pairs(self, tree: dict[str, Any]) -> dict[Any, Any]:
        return {self.value_of(key): self.value_of(item) for key, item in tree["pairs"]}

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
        # Only classes that the program has loaded by itself: a checkpoint must not import anything.
        kind: Any = sys.modules.get(module)
        for part in qualname.split("."):
            kind = getattr(kind, part, None)
        if not (isinstance(kind, type) and issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_unflatten__")):
            raise CheckpointError(
                f"the checkpoint holds a tensor of class {tree['class']}, which is not loaded here",
                f"import {module.partition('.')[0]} and prepare the same model and optimizer before load_state",
            )
        parts = {name: self.value_of(part) for name, part in tree["parts"].items()}
        context = self.value_of(tree["context"])
        size, stride = torch.Size(tree["shape"]), tuple(tree["stride"])
        value: torch.Tensor = kind.__tensor_unflatten__(parts, context, size, stride)
        return value


def _dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _scalar_of(kind: str, tree: dict[str, Any], decoder: _Decoder) -> Any:
    value = tree["value"]
    if kind == "int":
        return int(value, 16)
    if kind == "float":
        return float(value)
    if kind == "complex":
        return complex(decoder.value_of(value[0]), decoder.value_of(value[1]))
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray)(base64.b64decode(value))
    if kind == "dtype":
        return _dtype_of(value)
    if kind == "device":
        return torch.device(value)
    if kind == "path":
        return pathlib.Path(value)
    if kind == "numpy":
        import numpy

        array = numpy.frombuffer(base64.b64decode(value), dtype=numpy.dtype(tree["dtype"])).reshape(tree["shape"])
        return array[()] if tree["scalar"] else array.copy()
    raise CheckpointError(f"a saved value is of kind {kind!r}, which this version does not know", "upgrade trimtab")
