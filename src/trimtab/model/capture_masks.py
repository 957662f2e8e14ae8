"""Attention masks of transformers while a step is captured in a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

_capturing = RLock()  # otherwise capturing threads would restore each other's function


@contextmanager
def usual_masks() -> Iterator[None]:
    """Make transformers treat masks during a capture as it does outside, for batches without a mask.

    Some versions create a mask of ones while a stream is captured. No fused kernel accepts it, so attention would be
    computed from matrix products in fp32. If a batch has a mask, graphs use it whatever its values are: another batch
    may have other values.
    """
    import transformers.masking_utils

    masking_utils: Any = transformers.masking_utils
    with _capturing:
        own, thread = masking_utils.is_tracing, get_ident()

        def is_tracing(tensor: Any = None) -> bool:
            return False if tensor is None and get_ident() == thread else bool(own(tensor))

        masking_utils.is_tracing = is_tracing
        try:
            yield
        finally:
            masking_utils.is_tracing = own
