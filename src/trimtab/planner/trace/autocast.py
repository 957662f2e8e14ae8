"""CUDA's autocast for `meta` tensors: the same casts, and the same cache of cast weights.

torch's autocast ignores `meta` tensors. Here a `TorchFunctionMode` applies the same lists of functions. It sees calls
before autograd does, so casts are part of the graph, as on a GPU.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trimtab.planner.trace.thread_patches import stand_ins_on_this_thread

_STAND_INS = ("meta", "cuda")
_HALF = (torch.float16, torch.bfloat16)

# products: run in half precision
_LOWER: set[Any] = {
    functional.linear,
    functional.conv1d,
    functional.conv2d,
    functional.conv3d,
    functional.conv_transpose1d,
    functional.conv_transpose2d,
    functional.conv_transpose3d,
    functional.bilinear,
    torch.matmul,
    torch.mm,
    torch.mv,
    torch.bmm,
    torch.addmm,
    torch.addbmm,
    torch.baddbmm,
    torch.einsum,
    torch.chain_matmul,
    torch.conv1d,
    torch.conv2d,
    torch.conv3d,
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.Tensor.mm,
    torch.Tensor.bmm,
    torch.Tensor.addmm,
    torch.Tensor.baddbmm,
}
# inputs are cast to fp32
_UPPER: set[Any] = {
    functional.layer_norm,
    functional.group_norm,
    functional.nll_loss,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.kl_div,
    functional.cosine_similarity,
    functional.binary_cross_entropy_with_logits,
    functional.softplus,
    torch.layer_norm,
    torch.exp,
    torch.log,
    torch.log1p,
    torch.log2,
    torch.log10,
    torch.pow,
    torch.rsqrt,
    torch.reciprocal,
    torch.norm,
    torch.cosh,
    torch.sinh,
    torch.tan,
    torch.erfinv,
    torch.expm1,
    torch.dist,
    torch.cdist,
    torch.logsumexp,
    torch.Tensor.exp,
    torch.Tensor.log,
    torch.Tensor.pow,
    torch.Tensor.__pow__,
    torch.Tensor.__rpow__,
    torch.Tensor.rsqrt,
    torch.Tensor.reciprocal,
    torch.Tensor.norm,
    torch.Tensor.logsumexp,
}
if hasattr(functional, "rms_norm"):
    _UPPER.add(functional.rms_norm)
# computed in fp32 from half-precision inputs; they take (input, dim, dtype)
_TO_FP32: set[Any] = {
    functional.softmax,
    functional.log_softmax,
    torch.softmax,
    torch.log_softmax,
    torch.Tensor.softmax,
    torch.Tensor.log_softmax,
}
_SUMS: set[Any] = {torch.sum, torch.cumsum, torch.prod, torch.Tensor.sum, torch.Tensor.cumsum, torch.Tensor.prod}
# all inputs are cast to the widest of their dtypes
_WIDEST: set[Any] = {torch.addcdiv, torch.addcmul, torch.atan2, torch.dot, torch.cross, torch.tensordot}


class _State:
    """Nesting depth and dtype of autocast, and its cache of cast weights."""

    def __init__(self) -> None:
        self.depth = 0
        self.dtype: torch.dtype | None = None
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


class Autocast(TorchFunctionMode):
    """The context of one `with torch.autocast(…)` on `meta` tensors; contexts nest.

    Args:
        state: Shared by all contexts of a trace.
        dtype: The dtype of matrix products.
        enabled: False disables autocast inside.
    """

    def __init__(self, state: _State, dtype: torch.dtype | None, enabled: bool) -> None:
        super().__init__()
        self._state, self._dtype, self._enabled = state, dtype, enabled

    def __enter__(self) -> Any:
        self._before = self._state.dtype
        self._state.dtype = (self._dtype or torch.float16) if self._enabled else None
        self._state.depth += 1
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self._state.dtype = self._before
        self._state.depth -= 1
        if not self._state.depth:
            self._state.copies.clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtype = self._state.dtype
        if dtype is None or self._state.depth == 0:
            return func(*args, **kwargs)
        if func in _LOWER:
            return self._with(func, args, kwargs, dtype)
        if func in _UPPER:
            return self._with(func, args, kwargs, torch.float32)
        if func is functional.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        if func in _TO_FP32 and kwargs.get("dtype") is None and _is_half(args[0]):
            kwargs = {**kwargs, "dtype": torch.float32}
            return _softmax(func, args, kwargs)
        if func in _SUMS and kwargs.get("dtype") is None and args and _is_half(args[0]):
            return func(*args, **{**kwargs, "dtype": torch.float32})
        if func in _WIDEST:
            wide = any(isinstance(a, torch.Tensor) and a.dtype is torch.float32 for a in args)
            return self._with(func, args, kwargs, torch.float32 if wide else dtype)
        return func(*args, **kwargs)

    def _with(self, func: Any, args: Any, kwargs: Any, dtype: torch.dtype) -> Any:
        cast = self._cast
        return func(*(cast(a, dtype) for a in args), **{name: cast(value, dtype) for name, value in kwargs.items()})

    def _cast(self, value: Any, dtype: torch.dtype) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._cast(item, dtype) for item in value)
        if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == dtype:
            return value
        if value.dtype is torch.float64:
            return value
        is_cached = value.is_leaf and value.requires_grad and dtype is not torch.float32 and not value._is_view()
        if is_cached and torch.is_autocast_cache_enabled():
            if id(value) not in self._state.copies:
                self._state.copies[id(value)] = (value, value.to(dtype))
            return self._state.copies[id(value)][1]
        return value.to(dtype)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in _HALF


def _softmax(func: Any, args: Any, kwargs: Any) -> Any:
    """CUDA's softmax reads fp16 and writes fp32 in one kernel; bf16 is cast to fp32 first."""
    x = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if x.dtype is torch.float16 and dim is not None:
        op = torch._log_softmax if "log" in func.__name__ else torch._softmax
        return op(x, dim, True)
    return func(*args, **kwargs)


def _cross_entropy(logits: torch.Tensor, target: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Cross-entropy with its log-softmax in fp32, as under CUDA's autocast."""
    if _is_half(logits):
        logits = logits.float()
    return functional.cross_entropy(logits, target, *args, **kwargs)


@contextlib.contextmanager
def autocast_on_stand_in() -> Iterator[None]:
    """Make `torch.autocast` for "cuda" and "meta" apply to `meta` tensors of this thread."""
    state = _State()
    with stand_ins_on_this_thread([*_autocast_methods(state), *_autocast_questions(state)]):
        yield


def _autocast_methods(state: _State) -> Iterator[tuple[Any, str, Any]]:
    """Replacements for the methods of `torch.autocast`; the class itself stays, because other threads use it."""
    real: Any = torch.amp.autocast_mode.autocast
    init, enter, leave = real.__init__, real.__enter__, real.__exit__

    def stand_in_init(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: bool | None = None
    ) -> None:
        if device_type not in _STAND_INS:
            init(self, device_type, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
            return
        self.device, self.fast_dtype, self._enabled = device_type, dtype or torch.float16, enabled
        self._cache_enabled = True if cache_enabled is None else cache_enabled

    def stand_in_enter(self: Any) -> Any:
        if self.device not in _STAND_INS:
            return enter(self)
        region = Autocast(state, self.fast_dtype, self._enabled)
        self.__dict__.setdefault("_regions", []).append(region)  # as a decorator it may be entered twice
        region.__enter__()
        return self

    def stand_in_exit(self: Any, *exception: Any) -> Any:
        if self.device not in _STAND_INS:
            return leave(self, *exception)
        return self._regions.pop().__exit__(*exception)

    yield real, "__init__", stand_in_init
    yield real, "__enter__", stand_in_enter
    yield real, "__exit__", stand_in_exit


def _autocast_questions(state: _State) -> Iterator[tuple[Any, str, Any]]:
    """Replacements for the functions that return the state of autocast."""
    enabled_really, dtype_really = torch.is_autocast_enabled, torch.get_autocast_dtype
    available_really = torch.amp.is_autocast_available

    def is_enabled(device_type: str | None = None) -> bool:
        if device_type in _STAND_INS or device_type is None:
            return state.dtype is not None
        return enabled_really(device_type)

    def dtype_of(device_type: str) -> torch.dtype:
        if device_type in _STAND_INS:
            return state.dtype or torch.float16
        return dtype_really(device_type)

    def is_available(device_type: str) -> bool:
        return device_type in _STAND_INS or available_really(device_type)

    yield torch, "clear_autocast_cache", state.copies.clear
    yield torch, "is_autocast_enabled", is_enabled
    yield torch, "get_autocast_dtype", dtype_of
    yield torch.amp, "is_autocast_available", is_available
    yield torch.amp.autocast_mode, "is_autocast_available", is_available
