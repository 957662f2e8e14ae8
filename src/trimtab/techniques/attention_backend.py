"""The kernel that computes attention: cuDNN's, flash, memory-efficient, or plain matrix products.

torch chooses one for every call; on Hopper it chooses cuDNN for masked attention. cuDNN builds an execution plan for
every new shape, which takes longer than a whole step of a small model. If shapes repeat, cuDNN is the fastest.
Therefore `auto` depends on the GPU's generation and on the number of distinct micro-batch shapes.

The choice applies to one model (`trimtab.model.attention_kernels`). Every value is a preference: if its kernel cannot
run (flash does not support masks, fp32, or head sizes above 256), the next one in the list runs.

Packed rows (`memory.padding: none`) have a separate kernel, with one exception: with `cudnn`, rows of equal length,
such as blocks of a long text, are computed by cuDNN (`trimtab.model.packed_attention`).

Grouped heads: transformers passes keys and values with fewer heads to torch unchanged, and only the flash and cuDNN
kernels support them. With other kernels torch computes all pairs of positions in fp32, in memory that grows with the
square of the length. In that case the heads are repeated first, so that the memory-efficient kernel runs.
"""

from dataclasses import replace

import torch

from trimtab.data.batching import Batching
from trimtab.log import log_info_once, say
from trimtab.model.attention_kernels import has_grouped_heads, is_sdpa, use_attention
from trimtab.techniques.base import Accelerator, Case, Phase, Site, Technique

_HOPPER = 9  # major compute capability
_FLASH_CAPABILITY = (8, 0)
# up to this number of shapes, cuDNN's faster kernel saves more time in an epoch than building its plans costs
_FEW_SHAPES = 8


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
        """Choose cuDNN on Hopper if few shapes repeat, flash if there are many; elsewhere let torch choose."""
        asked, accelerator = str(self.asked(case.recipe)), case.accelerator
        if asked != "auto":
            if case.recipe is not None and case.recipe.memory.padding == "none":
                rows = "rows of one length" if asked == "cudnn" else "padded rows"
                log_info_once(f"{self.setting}: {asked} applies to {rows} only, and memory.padding is none")
            return (asked,)
        is_hopper = accelerator.capability is not None and accelerator.capability[0] == _HOPPER
        is_half = supports_flash_attention(accelerator, case.compute_dtype)  # cuDNN also needs half precision
        if case.recipe is None or not (accelerator.is_cuda and is_hopper and is_half and is_sdpa(case.model)):
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
        """Mark packed rows of equal length: cuDNN has no kernel for others."""
        return replace(batching, marks_equal_rows=True) if value == "cudnn" else batching

    def describe(self, value: str) -> str:
        """Return a text such as "attention flash"."""
        return f"attention {value}"


def _report_no_effect(model: torch.nn.Module, value: str, site: Site) -> None:
    if value == "torch":
        return
    if not site.accelerator.is_cuda:
        say(f"memory.attention_backend: {value} has no effect on this device ({site.accelerator.type})")
    elif not is_sdpa(model):
        say(f"memory.attention_backend: {value} has no effect on {type(model).__name__}, which has its own attention")


def supports_flash_attention(accelerator: Accelerator, compute_dtype: torch.dtype | None) -> bool:
    """Whether the flash kernel runs on a GPU in a dtype; None is fp32."""
    capability = accelerator.capability
    is_new = capability is not None and capability >= _FLASH_CAPABILITY
    return compute_dtype is not None and is_new and accelerator.has_flash
