"""A training function tried with smaller and smaller batches, until one fits into memory."""

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

import torch

from trimtab.errors import DoesNotFit
from trimtab.log import say

_MEMORY_WORDS = ("out of memory", "can't allocate memory", "CUDNN_STATUS_NOT_SUPPORTED", "CUDNN_STATUS_ALLOC_FAILED")


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[[], int] | None = None,
) -> Any:
    """A decorator: the function gets a batch size as its first argument, and again a smaller one if memory runs out.

    Args:
        function: It takes the batch size first; calls of it leave that out.
        starting_batch_size: The first one.
        reduce_batch_size_fn: Gives the next one; 0.9 times the last one, rounded down, if left out.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    return _Shrinking(function, starting_batch_size, reduce_batch_size_fn)


class _Shrinking:
    """The function; a batch size that fitted is kept for the next call."""

    def __init__(self, function: Callable[..., Any], batch_size: int, reduce: Callable[[], int] | None) -> None:
        self._function, self._batch_size, self._reduce = function, batch_size, reduce
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        names = list(inspect.signature(self._function).parameters)
        if len(names) < len(args) + 1:
            raise TypeError(
                f"{self._function.__name__} was called with {len(args)} arguments; it gets the batch size by itself, "
                f"so call it with ({', '.join(names[1:])})"
            )
        while self._batch_size > 0:
            free_device_memory()
            try:
                return self._function(self._batch_size, *args, **kwargs)
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                before = self._batch_size
                self._batch_size = int(before * 0.9) if self._reduce is None else self._reduce()
                say(f"batch size {before} does not fit into memory; the next is {self._batch_size}")
        raise DoesNotFit("No executable batch size found, reached zero.")


def ran_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _MEMORY_WORDS)


def release_memory(*objects: Any) -> list[None]:
    """Give freed memory back to the device; returns None for each object, to be assigned to their names."""
    free_device_memory()
    return [None] * len(objects)


def free_device_memory() -> None:
    """Collect what nothing refers to, and give what is free back to the device."""
    gc.collect()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        torch.get_device_module(accelerator).empty_cache()
