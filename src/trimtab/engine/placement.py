"""Moves batches of any structure to the device, without unneeded copies and without host-device syncs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device, non_blocking: bool = True) -> Any:
    """Move every tensor in a batch to a device; containers keep their type, other values are unchanged.

    Args:
        batch: A tensor, any nesting of dicts, lists, tuples, named tuples and dataclasses, or an object with a `to`
            method, such as a tokenizer's output.
        device: The target device.
        non_blocking: Whether copies from pinned memory are asynchronous.
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
    except TypeError:  # a `to` method without the argument non_blocking
        return batch.to(device)


class StayOnHost:
    """Placement for the CPU: batches are already in host memory."""

    pins_memory = False

    def __call__(self, batch: Any) -> Any:
        """Return the batch unchanged."""
        return batch


class CopyToDevice:
    """Placement for an accelerator: copies run on a second stream, in parallel with the computation.

    The host runs ahead of the device, so a batch copied when the loop asks for it arrives while earlier steps still
    compute. Batches are not prefetched, because that would change the order in which random numbers are drawn. Devices
    without torch streams, such as MPS, get a plain copy.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device) if device.type in ("cuda", "xpu") else None
        self.pins_memory = self._stream is not None

    def __call__(self, batch: Any) -> Any:
        """Copy a batch to the device; the current stream waits for the copy, the host does not."""
        if self._stream is None:
            return to_device(batch, self._device)
        with self._stream:
            moved = to_device(batch, self._device)
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        _mark_used_on(moved, current)
        return moved


Placement = StayOnHost | CopyToDevice


def placement_for(device: torch.device) -> Placement:
    """Return the placement for a device."""
    return StayOnHost() if device.type == "cpu" else CopyToDevice(device)


def _mark_used_on(batch: Any, stream: torch.Stream) -> None:
    """Keep the allocator from reusing the memory of a batch before `stream` has used it."""
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
