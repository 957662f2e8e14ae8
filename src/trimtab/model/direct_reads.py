"""Linear modules whose weight other code reads without calling them, found in the source of the modules around them.

Kernels of Mamba blocks take weights of linear modules as arguments, and some models compute with `self.proj.weight`. An
adapter on such a module has no effect, and a quantized weight cannot be read.
"""

import ast
import inspect
import operator
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

_READ = re.compile(r"\bself(\.\w+)+\.weight\b")
_NO_VALUES = {"dtype", "device", "shape", "ndim", "size", "dim", "numel", "requires_grad", "is_meta", "is_cuda"}
_NO_READERS = {"isinstance", "hasattr", "getattr", "id", "type"}
_NO_FORWARD = re.compile(r"init|reset|tie_|extra_repr")  # parts of the names of methods that no forward calls
_COMPARISONS = {
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Eq: operator.eq,
}
# DeBERTa reads it for a second pass of its last layers, which exists in transformers but never runs.
_NEVER_RUN = {("DisentangledSelfAttention", "in_proj")}


class _Guard(NamedTuple):
    """A condition around a read: an attribute of the module compared with a constant."""

    attribute: str
    compare: Any
    constant: Any

    def holds(self, module: torch.nn.Module) -> bool:
        value = getattr(module, self.attribute, None)
        try:
            return value is None or bool(self.compare(value, self.constant))
        except (TypeError, ValueError, RuntimeError):  # not a number, or a tensor of several elements
            return True


class _Read(NamedTuple):
    """A read of a weight: the path from the reading module to the linear one, and the conditions around it."""

    path: tuple[str, ...]
    guards: tuple[_Guard, ...]


def directly_read(model: torch.nn.Module) -> dict[str, str]:
    """Names of the linear modules whose weights other modules may read in forward, with the class that reads them.

    Code that runs only on some devices is included. Modules without available source are assumed to read nothing.
    """
    from transformers.pytorch_utils import Conv1D

    names = {id(module): name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for reader in model.modules():
        kind: Any = type(reader)
        for read in _reads(kind):
            target: Any = reader
            for part in read.path:
                target = getattr(target, part, None)
            is_used = all(guard.holds(reader) for guard in read.guards)
            if is_used and isinstance(target, torch.nn.Linear | Conv1D) and id(target) in names:
                found.setdefault(names[id(target)], kind.__name__)
    return found


@cache
def _reads(kind: type) -> tuple[_Read, ...]:
    found: dict[_Read, None] = {}
    for base in kind.__mro__:
        for read in _reads_in_file(_source_file(base)).get(base.__qualname__, ()):
            if (base.__name__, *read.path) not in _NEVER_RUN:
                found[read] = None
    return tuple(found)


def _source_file(kind: type) -> str | None:
    try:
        return inspect.getsourcefile(kind)
    except (OSError, TypeError):  # a class of an extension, or made at run time
        return None


@cache
def _reads_in_file(path: str | None) -> dict[str, tuple[_Read, ...]]:
    """Reads in one source file, by class name."""
    if path is None:
        return {}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {}
    if not _READ.search(text):
        return {}
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return {
        node.name: tuple(read for method in _methods(node) for read in _reads_below(method, ())) for node in classes
    }


def _methods(node: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and not _NO_FORWARD.search(part.name):
            yield part


def _reads_below(node: ast.AST, guards: tuple[_Guard, ...]) -> Iterator[_Read]:
    """The reads in a piece of source, with the conditions of the branches that they are in."""
    if isinstance(node, ast.If):
        for statement in node.body:
            yield from _reads_below(statement, guards + _guards(node.test))
        for other in (node.test, *node.orelse):
            yield from _reads_below(other, guards)
        return
    if isinstance(node, ast.Attribute) and _is_no_value(node.attr) and _path_to_weight(node.value):
        return
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _NO_READERS:
        return
    path = _path_to_weight(node)
    if path:
        yield _Read(path, guards)
        return
    for part in ast.iter_child_nodes(node):
        yield from _reads_below(part, guards)


def _is_no_value(name: str) -> bool:
    """Whether an attribute of a parameter does not depend on its values, such as its shape."""
    return name in _NO_VALUES or name.startswith("_")


def _path_to_weight(node: ast.AST) -> tuple[str, ...]:
    """The names between `self` and `weight` in an expression such as self.mixer.proj.weight; empty for others."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    is_weight = isinstance(node, ast.Name) and node.id == "self" and len(names) > 1 and names[-1] == "weight"
    return tuple(names[:-1]) if is_weight else ()


def _guards(test: ast.expr) -> tuple[_Guard, ...]:
    """The comparisons of attributes of `self` with constants that a condition requires."""
    parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
    return tuple(guard for part in parts if (guard := _guard(part)) is not None)


def _guard(test: ast.expr) -> _Guard | None:
    match test:
        case ast.Compare(ast.Attribute(ast.Name("self"), name), [comparison], [ast.Constant(constant)]):
            compare = _COMPARISONS.get(type(comparison))
            return None if compare is None else _Guard(name, compare, constant)
    return None
