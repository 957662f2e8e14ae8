"""Tensors that live in host memory and visit a device, unit by unit, in two buffers that take turns.

While the tensors of one unit are in use, those of the next are copied to the other buffer, on a separate stream. A
tensor keeps its identity: only its data is exchanged, between host memory and a fixed place in a buffer.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.model.host_areas import aligned, laid_out
from trimtab.model.host_pages import HostLink

_NUM_BUFFERS = 2


class Visits:
    """Tensors in host memory, in units that visit the device one after the other.

    Args:
        device: The device.
        link: Copies between both.
        part: What the tensors are in the anatomy of memory: "weights" or "state".
    """

    def __init__(self, device: torch.device, link: HostLink, part: str) -> None:
        self._device, self._link, self._part = device, link, part
        self._units: list[_Unit] = []
        self._buffers: list[torch.Tensor] = []
        self._held: list[int | None] = [None] * _NUM_BUFFERS  # the unit whose values a buffer has, or gets
        self._arrived: list[Any] = [None] * _NUM_BUFFERS  # events of copies that were not waited for
        self._sent: list[Any] = [None] * _NUM_BUFFERS  # events of copies back to the host
        self._homes: list[torch.Tensor] = []  # host memory of the visiting unit
        self.visiting: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Invalidate the buffers, because values in host memory may have changed. Allocates the buffers.

        Args:
            tensors: The tensors of each unit; their data is host memory while the unit does not visit.
        """
        assert self.visiting is None
        self._held = [None] * _NUM_BUFFERS
        if [unit.layout for unit in self._units] == [_layout_of(unit) for unit in tensors]:
            return
        sizes = [sum(aligned(tensor.nbytes) for tensor in unit) for unit in tensors]
        wanted = [max(sizes[slot::_NUM_BUFFERS], default=0) for slot in range(_NUM_BUFFERS)]
        if [buffer.nbytes for buffer in self._buffers] != wanted:
            self._buffers = [empty_buffer(size, self._device, self._part) for size in wanted]
        self._units = [_Unit(unit, self._buffers[number % _NUM_BUFFERS]) for number, unit in enumerate(tensors)]

    def fetch(self, number: int) -> None:
        """Start to copy a unit to its buffer, unless there is no such unit or it is there."""
        slot = number % _NUM_BUFFERS
        if not 0 <= number < len(self._units) or self._held[slot] == number:
            return
        unit = self._units[number]
        pairs = [(view, tensor.data) for tensor, view in zip(unit.tensors, unit.views, strict=True)]
        self._held[slot] = number
        self._arrived[slot] = self._link.copy_in(pairs, self._device, self._sent[slot])
        self._sent[slot] = None

    def enter(self, number: int) -> None:
        """Let the tensors of a unit be on the device; the current stream waits until they are."""
        self.fetch(number)
        slot, unit = number % _NUM_BUFFERS, self._units[number]
        if self._arrived[slot] is not None:
            self._link.wait_fetched(self._arrived[slot])
            self._arrived[slot] = None
        self._homes = [tensor.data for tensor in unit.tensors]
        for tensor, view in zip(unit.tensors, unit.views, strict=True):
            tensor.data = view
        self.visiting = number

    def leave(self, *, has_changed: bool) -> None:
        """Let the tensors of the visiting unit be in host memory again, with their new values if they have changed."""
        if self.visiting is None:
            return
        slot, unit = self.visiting % _NUM_BUFFERS, self._units[self.visiting]
        for tensor, home in zip(unit.tensors, self._homes, strict=True):
            tensor.data = home
        if has_changed and unit.tensors:
            pairs = list(zip(self._homes, unit.views, strict=True))
            self._sent[slot] = self._link.copy_out(pairs, self._device)
        self._homes, self.visiting = [], None


class _Unit:
    """Tensors that visit together, and their places in a buffer."""

    def __init__(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        self.tensors, self.layout = list(tensors), _layout_of(tensors)
        self.views: list[torch.Tensor] = []
        begin = 0
        with torch.inference_mode(False), torch.no_grad():
            for tensor in tensors:
                self.views.append(laid_out(buffer[begin : begin + tensor.nbytes], tensor))
                begin += aligned(tensor.nbytes)


def _layout_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(id(tensor), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def empty_buffer(num_bytes: int, device: torch.device, part: str) -> torch.Tensor:
    """Memory of the device for a unit; `part` is for the anatomy of a trace."""
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
