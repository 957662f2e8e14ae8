"""Which kernel computes attention: cuDNN's, flash, memory-efficient, or plain matrix products.

torch chooses one for every call; on Hopper it chooses cuDNN for masked attention. cuDNN builds an execution plan for
every new shape, which takes longer than a whole step of a small model. If shapes repeat, cuDNN is the fastest.
Therefore `auto` depends on the GPU's generation and on the number of distinct micro-batch shapes.

The choice applies to one model: its attention calls a function of this module that sets torch's backend flags around
the call, also when a block is recomputed in backward. Every value is a preference: if its kernel cannot run (flash does
not support masks, fp32, or head sizes above 256), the next one of the list runs.

Packed rows (`memory.padding: none`) have a kernel of their own, with one exception: with `cudnn`, rows of one length,
such as blocks of a long text, are computed by cuDNN (`trimtab.model.packed_attention`).

Grouped heads: transformers passes keys and values with fewer heads to torch unchanged, and only the flash and cuDNN
kernels support them. With other kernels torch computes all pairs of positions in fp32, in memory that grows with the
square of the length. In that case the heads are repeated first, so that the memory-efficient kernel runs.
"""

import inspect
import re
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.data.batching import Batching
from trimtab.log import log_info_once, say
from trimtab.techniques.base import Accelerator, Case, Phase, Site, Technique

_HOPPER = 9  # major compute capability
_FLASH_CAPABILITY = (8, 0)
_FEW_SHAPES = 8  # up to this number, cuDNN's faster kernel gains more in an epoch than building its plans costs
_NAME = "trimtab_attention"
_NAME_IS_READ = re.compile(r"""_attn_implementation\s*(==|!=|(not\s+)?in\b)[^\n]*["']sdpa["']""")


class AttentionBackend(Technique):
    """Choose the kernel that computes attention."""

    key = "attention_backend"
    setting = "memory.attention_backend"
    off = None
    phase = Phase.KERNELS
    before = "torch"
    is_kept_on_resume = True
    study = ("attention", ("torch", "cudnn", "flash", "efficient", "math"))

    def values(self, case: Case) -> tuple[str, ...]:
        """Choose cuDNN on Hopper where few shapes repeat, flash where there are many; elsewhere torch's own choice."""
        asked, accelerator = str(self.asked(case.recipe)), case.accelerator
        if asked != "auto":
            if case.recipe is not None and case.recipe.memory.padding == "none":
                rows = "rows of one length" if asked == "cudnn" else "padded rows"
                log_info_once(f"{self.setting}: {asked} applies to {rows} only, and memory.padding is none")
            return (asked,)
        is_hopper = accelerator.capability is not None and accelerator.capability[0] == _HOPPER
        is_half = supports_flash_attention(accelerator, case.compute_dtype)  # cuDNN needs half precision, too
        if case.recipe is None or not (accelerator.is_cuda and is_hopper and is_half and _is_sdpa(case.model)):
            return ("torch",)
        has_few = case.count_shapes is not None and case.count_shapes() <= _FEW_SHAPES
        return ("cudnn",) if has_few else ("flash",)

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Replace the model's attention function, unless torch would choose the right kernel anyway."""
        if site.recipe is None:  # a user's own loop keeps its attention
            return
        if not site.is_traced:
            _report_no_effect(model, value, site)
        if not (site.accelerator.is_cuda or site.is_traced):
            return
        takes_groups = value != "efficient" and supports_flash_attention(site.accelerator, site.compute_dtype)
        repeats = not takes_groups and has_grouped_heads(model)
        if repeats or value != "torch":
            use_attention(model, value, repeats_heads=repeats)

    def change_batching(self, batching: Batching, value: str) -> Batching:
        """Packed rows of one length are marked: for others cuDNN has no kernel."""
        return replace(batching, marks_equal_rows=True) if value == "cudnn" else batching

    def describe(self, value: str) -> str:
        """Such as "attention flash"."""
        return f"attention {value}"


def _report_no_effect(model: torch.nn.Module, value: str, site: Site) -> None:
    if value == "torch":
        return
    if not site.accelerator.is_cuda:
        say(f"memory.attention_backend: {value} has no effect on this device ({site.accelerator.type})")
    elif not _is_sdpa(model):
        say(f"memory.attention_backend: {value} has no effect on {type(model).__name__}, which has its own attention")


def supports_flash_attention(accelerator: Accelerator, compute_dtype: torch.dtype | None) -> bool:
    """Whether the flash kernel runs on a GPU in a dtype; None is fp32."""
    capability = accelerator.capability
    is_new = capability is not None and capability >= _FLASH_CAPABILITY
    return compute_dtype is not None and is_new and accelerator.has_flash


def use_attention(model: Any, backend: str, *, repeats_heads: bool = False) -> None:
    """Make the attention of a transformers model prefer a kernel.

    Args:
        model: A transformers model whose attention implementation is "sdpa"; others are not changed.
        backend: "cudnn", "flash", "efficient", "math", or "torch" for torch's own choice.
        repeats_heads: Repeat the heads of keys and values before attention.
    """
    if not _is_sdpa(model):
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    # transformers would mistake a name that contains "flash" for its flash-attn integration
    name = f"{_NAME}_{list(_CONTEXTS).index(backend)}" + ("_repeated" if repeats_heads else "")
    AttentionInterface.register(name, _attention_function(backend, repeats_heads))
    AttentionMaskInterface.register(name, sdpa_mask)  # without this the model would get no mask
    model.set_attn_implementation(name)


def _is_sdpa(model: Any) -> bool:
    """Whether attention is torch's, reached through transformers' interface; Falcon, for one, calls it directly."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    home = type(model).__module__
    has_interface = hasattr(sys.modules.get(home), "ALL_ATTENTION_FUNCTIONS")
    return has_interface and not any(map(_reads_name, {type(module).__module__ for module in model.modules()}))


@cache
def _reads_name(module: str) -> bool:
    """Whether code of a model does something for the name "sdpa" alone, such as the mask of sparse attention."""
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
    """What transformers reads of an attention module whose heads are repeated already."""

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
# torch.compile traces no other context than sdpa_kernel; its 13 µs are spent once, when a block is compiled
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
