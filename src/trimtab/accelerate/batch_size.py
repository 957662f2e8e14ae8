"""`find_executable_batch_size`: call a training function with smaller and smaller batches until one fits."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import DoesNotFit
from trimtab.hardware.memory import is_out_of_memory, release_cached_memory
from trimtab.log import say


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """Decorate a function that takes a batch size as its first argument; it is called again when memory runs out.

    Args:
        function: The function to decorate. Callers of the decorated function leave the batch size out.
        starting_batch_size: The first batch size to try.
        reduce_batch_size_fn: Returns the next batch size; the default is 0.9 times the last one, rounded down.

    Example:
        @find_executable_batch_size(starting_batch_size=64)
        def train(batch_size):
            ...

        train()
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _ShrinkingBatch(function, starting_batch_size, reduce_batch_size_fn)


class _ShrinkingBatch:
    """The decorated function; it remembers the batch size that fit for the next call."""

    def __init__(self, function: Callable[..., Any], batch_size: int, reduce: Callable[[], int] | None) -> None:
        self._function, self._batch_size, self._reduce = function, batch_size, reduce
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self._function).parameters)
        if len(names) < len(args) + 1:
            raise TypeError(
                f"{self._function.__name__} was called with {len(args)} arguments, but the decorator passes the "
                f"batch size itself: call it with ({', '.join(names[1:])})"
            )
        while self._batch_size > 0:
            release_memory()
            try:
                return self._function(self._batch_size, *args, **kwargs)
            except Exception as error:
                # cuDNN reports this status when its workspace does not fit
                if not is_out_of_memory(error) and "CUDNN_STATUS_NOT_SUPPORTED" not in str(error):
                    raise
                before = self._batch_size
                self._batch_size = int(before * 0.9) if self._reduce is None else self._reduce()
                say(f"batch size {before} does not fit into memory; trying {self._batch_size}")
        raise DoesNotFit("No executable batch size found, reached zero.")


def release_memory(*objects: Any) -> list[None]:
    """Collect garbage and empty the device's cache.

    Args:
        objects: The objects to release.

    Returns:
        None for each object, to assign to its variable: `model, optimizer = release_memory(model, optimizer)`.
    """
    release_cached_memory(torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu"))
    return [None] * len(objects)
