"""Attention masks of transformers while a step is captured in a CUDA graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

_capturing = RLock()  # threads that capture restore each other's function otherwise


@contextmanager
def usual_masks() -> Iterator[None]:
    """Let transformers decide about masks as outside of a capture, where a batch has none.

    Some versions make a mask of ones while a stream is captured. No fused kernel takes it, so attention would be
    computed from matrix products in fp32. A mask that a batch has is used in graphs, whatever its values: another batch
    may have other ones.
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
