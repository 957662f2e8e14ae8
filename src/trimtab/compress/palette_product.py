"""The product of a few rows with a clustered weight, directly from its indices, if a Triton kernel can run.

With few rows a product is limited by reading the weight: indices of 4 bits are an eighth of fp32. With many rows it is
limited by arithmetic, and decoding once for a dense product is faster.
"""

import functools
import importlib
from typing import Any

from torch import Tensor

from trimtab.compress.clustered_weight import ClusteredWeight
from trimtab.hardware.extras import has_package

MAX_ROWS = 8  # with more rows, the weight is decoded and multiplied by cuBLAS


def palette_product(x: Tensor, weight: ClusteredWeight) -> Tensor | None:
    """Return x Wᵀ, or None if no kernel supports it: then decode the weight."""
    if not x.is_cuda or x.numel() > MAX_ROWS * x.shape[-1] or 8 % weight.bits or x.requires_grad:
        return None
    kernel = _kernel()
    return None if kernel is None else kernel.multiply(x, weight)


@functools.cache
def _kernel() -> Any:
    return importlib.import_module("trimtab.compress.palette_kernel") if has_package("triton") else None
