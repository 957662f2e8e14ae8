"""Attention of one transformers model through a chosen kernel: cuDNN's, flash, memory-efficient, or matrix products.

The model's attention calls a function of this module that sets torch's backend flags around the call, also when a block
is recomputed in backward.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

_NAME = "trimtab_attention"
_NAME_IS_READ = re.compile(r"""_attn_implementation\s*(==|!=|(not\s+)?in\b)[^\n]*["']sdpa["']""")


def use_attention(model: Any, backend: str, *, repeats_heads: bool = False) -> None:
    """Make the attention of a transformers model prefer a kernel.

    Args:
        model: A transformers model whose attention implementation is "sdpa"; others are not changed.
        backend: "cudnn", "flash", "efficient", "math", or "torch" for torch's own choice.
        repeats_heads: Whether to repeat the heads of keys and values before attention.
    """
    if not is_sdpa(model):
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # transformers would mistake a name that contains "flash" for its flash-attn integration
    name = f"{_NAME}_{list(_CONTEXTS).index(backend)}" + ("_repeated" if repeats_heads else "")
    AttentionInterface.register(name, _attention_function(backend, repeats_heads))
    AttentionMaskInterface.register(name, sdpa_mask)  # without this the model would get no mask
    model.set_attn_implementation(name)


def is_sdpa(model: Any) -> bool:
    """Whether attention is torch's, called through transformers' interface; Falcon, for example, calls it directly."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    home = type(model).__module__
    has_interface = hasattr(sys.modules.get(home), "ALL_ATTENTION_FUNCTIONS")
    return has_interface and not any(map(_reads_name, {type(module).__module__ for module in model.modules()}))


@cache
def _reads_name(module: str) -> bool:
    """Whether code of a model checks for the name "sdpa", for example to choose the mask of sparse attention."""
    found = sys.modules.get(module)
    if not hasattr(found, "ALL_ATTENTION_FUNCTIONS"):
        return False
    try:
        source = inspect.getsource(found)  # type: ignore[arg-type]
    except (OSError, TypeError):
        return False
    return _NAME_IS_READ.search(source) is not None


def has_grouped_heads(model: Any) -> bool:
    """Whether keys and values of a model have fewer heads than queries."""
    return any(getattr(module, "num_key_value_groups", 1) > 1 for module in model.modules())


def _attention_function(backend: str, repeats_heads: bool) -> Callable[..., Any]:
    """A function for transformers' attention interface; it is called for every layer, so all lookups happen here."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

    preference = _CONTEXTS[backend]()
    traceable = _TRACEABLE[backend]

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> Any:
        if repeats_heads:
            groups = getattr(module, "num_key_value_groups", 1)
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
            module = _Ungrouped(getattr(module, "is_causal", True))
        with traceable() if torch.compiler.is_compiling() else preference:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    return attention


class _Ungrouped:
    """The attributes that transformers reads from an attention module whose heads are already repeated."""

    num_key_value_groups = 1

    def __init__(self, is_causal: bool) -> None:
        self.is_causal = is_causal


class _Preference:
    """Sets torch's process-wide flags of attention kernels for one call.

    `torch.nn.attention.sdpa_kernel` does the same in 13 µs per call, this class in 1 µs; that matters for small models.
    """

    def __init__(self, uses_cudnn: bool, uses_flash: bool, uses_efficient: bool) -> None:
        self._wanted = (uses_cudnn, uses_flash, uses_efficient)
        self._before: list[tuple[bool, ...]] = []

    def __enter__(self) -> None:
        _switching.acquire()  # without the lock a second thread could restore the values of the first
        self._before.append(tuple(is_enabled() for is_enabled, _ in _SWITCHES))
        self._set(self._wanted)

    def __exit__(self, *exception: object) -> None:
        self._set(self._before.pop())
        _switching.release()

    @staticmethod
    def _set(values: tuple[bool, ...]) -> None:
        for (_, enable), value in zip(_SWITCHES, values, strict=True):
            enable(value)


class _CudnnFirst:
    """Gives cuDNN priority over the other kernels; slower per call than `_Preference`, which cannot set priorities."""

    def __enter__(self) -> None:
        _switching.acquire()
        self._inner = sdpa_kernel(_CUDNN_FIRST, set_priority=True)
        self._inner.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inner.__exit__(*exception)
        _switching.release()


_switching = threading.RLock()
_SWITCHES: tuple[tuple[Any, Any], ...] = (
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
)
_CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# torch.compile traces only sdpa_kernel, no other context; its 13 µs are spent once, when a block is compiled
_TRACEABLE: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "cudnn": partial(sdpa_kernel, _CUDNN_FIRST, set_priority=True),
    "flash": partial(sdpa_kernel, _CUDNN_FIRST[1:]),
    "efficient": partial(sdpa_kernel, _CUDNN_FIRST[2:]),
    "math": partial(sdpa_kernel, _CUDNN_FIRST[3:]),
}
_CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "torch": nullcontext,
    "cudnn": _CudnnFirst,
    "flash": partial(_Preference, uses_cudnn=False, uses_flash=True, uses_efficient=True),
    "efficient": partial(_Preference, uses_cudnn=False, uses_flash=False, uses_efficient=True),
    "math": partial(_Preference, uses_cudnn=False, uses_flash=False, uses_efficient=False),
}
