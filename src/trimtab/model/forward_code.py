"""The code of a forward, by which modules are recognized: many classes copy that of another family."""

import inspect
from functools import cache
from typing import Any


@cache
def code_of(function: Any) -> tuple[Any, ...] | None:
    """Instructions, names and constants of a function without its docstring; None if it is not a Python function."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(value for value in code.co_consts if not isinstance(value, str))
