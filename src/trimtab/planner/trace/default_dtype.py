"""Build models in a given dtype without changing torch's default dtype, which all threads share."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread


class _DefaultDtype(TorchFunctionMode):
    """Create `meta` tensors on this thread as if torch's default dtype were another one.

    The default applies if neither a dtype argument nor a floating-point input determines the dtype, as in
    `torch.empty(3)` or `torch.log(torch.arange(3))`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype, self._real = dtype, torch.empty(0, device="meta").dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not isinstance(made, torch.Tensor) or made.dtype != self._real or func is torch.Tensor.float:
            return made
        return made if any(map(_says_a_dtype, (*args, *kwargs.values()))) else made.to(self._dtype)


def _says_a_dtype(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_says_a_dtype, value))
    if isinstance(value, torch.Tensor):
        return value.is_floating_point()
    return isinstance(value, torch.dtype) or hasattr(value, "dtype")  # arrays


@contextlib.contextmanager
def own_default_dtype() -> Iterator[None]:
    """Prevent transformers' `from_config` on this thread from changing torch's default dtype."""
    from transformers import modeling_utils

    @contextlib.contextmanager
    def local_dtype(dtype: torch.dtype, *_: Any) -> Iterator[None]:
        with _DefaultDtype(dtype), stand_ins_on_this_thread([(torch, "get_default_dtype", lambda: dtype)]):
            yield

    with stand_ins_on_this_thread([(modeling_utils, "local_torch_dtype", local_dtype)]):
        yield
