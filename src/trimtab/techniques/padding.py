"""Batches without padding: a micro-batch is one sequence of concatenated rows, and attention stays within each row.

No operation computes padding, so micro-batches can be filled up to a number of tokens with rows of any length. The
batches are made in `trimtab.data.packing`; `trimtab.model.padding_free` changes the attention of a model and the input
of its head.
"""

from dataclasses import replace

import torch

from trimtab.data.batching import Batching
from trimtab.log import log_info_once
from trimtab.model.packed_attention import Kernel, kernel_for
from trimtab.model.padding_free import enable, find_problem
from trimtab.techniques.adapter import adapter_settings, num_virtual_tokens
from trimtab.techniques.base import Accelerator, Case, Phase, Site, Technique


class Padding(Technique):
    """Concatenate rows instead of padding them."""

    key = "padding"
    setting = "memory.padding"
    off = "longest"
    before = "longest"
    phase = Phase.KERNELS
    is_kept_on_resume = True
    study = ("padding", ("longest", "none"))

    def values(self, case: Case) -> tuple[str, ...]:
        """Resolve `auto`: none if torch's flash kernel can compute packed rows; a model that needs padding gets it."""
        asked = self.asked(case.recipe)
        kernel = _kernel(case.accelerator, case.compute_dtype)
        if asked == "longest" or case.recipe is None or (asked == "auto" and kernel is not Kernel.FLASH):
            return ("longest",)
        problem = self._problem(case)
        if problem is not None and asked == "none":
            log_info_once(f"memory.padding: longest, because {problem}")
        return ("none",) if problem is None else ("longest",)

    def _problem(self, case: Case) -> str | None:
        settings = None if case.recipe is None else adapter_settings(case.recipe)
        if settings is not None and num_virtual_tokens(case.recipe):
            return f"virtual tokens are put before each row (adapter: {settings.kind})"
        if case.has_own_loss:
            return "a custom loss gets rows of equal length"
        return find_problem(case.model, case.model_kind, _kernel(case.accelerator, case.compute_dtype))

    def can_keep(self, value: str, case: Case) -> bool:
        """Return whether this machine has a kernel for packed rows."""
        return value == "longest" or self._problem(case) is None

    def change_model(self, model: torch.nn.Module, value: str, site: Site) -> None:
        """Let the model accept batches with and without padding."""
        kernel = _kernel(site.accelerator, site.compute_dtype)
        assert kernel is not None, "values() offers it only where there is a kernel"
        enable(model, site.model_kind, kernel)

    def change_batching(self, batching: Batching, value: str) -> Batching:
        """Pack the rows of a batch."""
        return batching if value == "longest" else replace(batching, is_packed=True)

    def describe(self, value: str) -> str:
        """Return a text such as "no padding"."""
        return "no padding" if value == "none" else f"padding {value}"


def _kernel(accelerator: Accelerator, compute_dtype: torch.dtype | None) -> Kernel | None:
    return kernel_for(accelerator.type, compute_dtype, accelerator.capability, accelerator.has_flash)
