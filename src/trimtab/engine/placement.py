"""Batches onto the device: whatever their shape, without needless copies, and without stopping the host."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """`batch` with every tensor in it on `device`; containers keep their type, other values pass through.

    Args:
        batch: A tensor, or any nesting of dicts, lists, tuples, named tuples and dataclasses, or an object that
            has a `to` method, as tokenizers return.
        device: Where it should be.
        non_blocking: Copy from pinned memory without waiting for the copy.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking)
    if isinstance(batch, dict) and type(batch) is dict:
        return {key: to_device(value, device, non_blocking) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device, non_blocking) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device, non_blocking) for value in batch)
    if hasattr(batch, "to"):
        return _call_to(batch, device, non_blocking)
    if isinstance(batch, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in batch.items()}
        return type(batch)(moved)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **to_device(fields, device, non_blocking))
    return batch


def _call_to(batch: Any, device: torch.device, non_blocking: bool) -> Any:
    try:
        return batch.to(device, non_blocking=non_blocking)
    except TypeError:  # a `to` that takes a device alone
        return batch.to(device)


class StayOnHost:
    """Placement for the CPU: a batch is where it should be already."""

    pins_memory = False

    def __call__(self, batch: Any) -> Any:
        """`batch` itself."""
        return batch


class CopyAhead:
    """Placement for an accelerator: copies run on a stream of their own, beside the computation.

    The host is steps ahead of the device, so a batch that is copied on a second stream when the loop asks for it
    arrives while earlier steps still compute. Nothing is fetched ahead of the loop, which would change the order in
    which random numbers are drawn.
    """

    pins_memory = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def __call__(self, batch: Any) -> Any:
        """`batch` on the device; the current stream waits for it, the host does not."""
        with self._stream:
            moved = to_device(batch, self._device)
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        _mark_used_on(moved, current)
        return moved


class CopyInPlace:
    """Placement for devices without streams that torch can name (MPS): a plain copy."""

    pins_memory = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, batch: Any) -> Any:
        """`batch` on the device."""
        return to_device(batch, self._device)


Placement = StayOnHost | CopyAhead | CopyInPlace


def placement_for(device: torch.device) -> Placement:
    """How batches come to `device`."""
    if device.type == "cpu":
        return StayOnHost()
    if device.type in ("cuda", "xpu"):
        return CopyAhead(device)
    return CopyInPlace(device)


def _mark_used_on(batch: Any, stream: torch.Stream) -> None:
    """Keep the allocator from reusing the memory of `batch` before `stream` is done with it."""
    if isinstance(batch, torch.Tensor):
        if batch.device.type != "cpu":
            batch.record_stream(stream)
    elif isinstance(batch, Mapping):
        for value in batch.values():
            _mark_used_on(value, stream)
    elif isinstance(batch, list | tuple):
        for value in batch:
            _mark_used_on(value, stream)
    elif dataclasses.is_dataclass(batch):
        for field in dataclasses.fields(batch):
            _mark_used_on(getattr(batch, field.name), stream)
