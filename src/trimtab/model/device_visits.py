"""Tensors in host memory that are copied to a device when needed, unit by unit, into buffers that take turns.

While the tensors of one unit are in use, those of the next are copied to another buffer, on a separate stream. With two
buffers, a copy to the device has to wait until changed values were copied back; with three it does not. A tensor keeps
its identity: only its data is swapped between host memory and a fixed position in a buffer.

If the data of a unit is where `host_areas.move_to_area` put it, the unit is copied as one piece. If the data of any
tensor was replaced since then, the tensors are copied one by one, from and to their current memory.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.model.host_areas import HostArea, has_no_gaps, laid_out, places_of
from trimtab.model.host_pages import HostLink


class Visits:
    """Tensors in host memory, in units that are copied to the device one after another.

    Args:
        device: The device.
        link: Copies between host and device.
        part: The part of the memory anatomy that the tensors belong to: "weights" or "state".
        num_buffers: Number of units that have memory on the device.
    """

    def __init__(self, device: torch.device, link: HostLink, part: str, num_buffers: int = 2) -> None:
        self._device, self._link, self._part = device, link, part
        self._num_buffers = num_buffers
        self._units: list[_Unit] = []
        self._areas: dict[int, HostArea] = {}  # areas of units that were moved to one area
        self._buffers: list[torch.Tensor] = []
        self._held: list[int | None] = [None] * num_buffers  # the unit whose values each buffer holds or receives
        self._arrived: list[Any] = [None] * num_buffers  # events of copies that nothing has waited for yet
        self._sent: list[Any] = [None] * num_buffers  # events of copies back to the host
        self._homes: list[torch.Tensor] = []  # host memory of the unit that is on the device
        self.visiting: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Invalidate the buffers, because values in host memory may have changed. Allocates the buffers.

        Args:
            tensors: The tensors of each unit; their data is in host memory while the unit is not on the device.
        """
        assert self.visiting is None
        self._held = [None] * self._num_buffers
        if [unit.layout for unit in self._units] == [_layout_of(unit) for unit in tensors]:
            return
        sizes = [places_of(unit)[1] for unit in tensors]
        wanted = [max(sizes[slot :: self._num_buffers], default=0) for slot in range(self._num_buffers)]
        if [buffer.nbytes for buffer in self._buffers] != wanted:
            self._buffers = [empty_buffer(size, self._device, self._part) for size in wanted]
        self._units = [_Unit(unit, self._buffers[number % self._num_buffers]) for number, unit in enumerate(tensors)]

    def set_area(self, number: int, area: HostArea) -> None:
        """Record that a unit's tensors are in one area of host memory, laid out by `host_areas.places_of`."""
        self._areas[number] = area

    def fetch(self, number: int) -> None:
        """Start to copy a unit to its buffer, unless there is no such unit or it is already there."""
        slot = number % self._num_buffers
        if not 0 <= number < len(self._units) or self._held[slot] == number:
            return
        unit, area = self._units[number], self._area_in_use(number)
        if area is not None:
            pairs = [(unit.whole, area)]
        else:
            pairs = [(view, tensor.data) for tensor, view in zip(unit.tensors, unit.views, strict=True)]
        self._held[slot] = number
        self._arrived[slot] = self._link.copy_in(pairs, self._device, self._sent[slot])
        self._sent[slot] = None

    def enter(self, number: int) -> None:
        """Switch the tensors of a unit to device memory; the current stream waits for the copy."""
        self.fetch(number)
        slot, unit = number % self._num_buffers, self._units[number]
        if self._arrived[slot] is not None:
            self._link.wait_fetched(self._arrived[slot])
            self._arrived[slot] = None
        self._homes = [tensor.data for tensor in unit.tensors]
        for tensor, view in zip(unit.tensors, unit.views, strict=True):
            tensor.data = view
        self.visiting = number

    def leave(self, *, has_changed: bool) -> None:
        """Switch the tensors of the current unit back to host memory, with their new values if they have changed."""
        if self.visiting is None:
            return
        slot, unit = self.visiting % self._num_buffers, self._units[self.visiting]
        for tensor, home in zip(unit.tensors, self._homes, strict=True):
            tensor.data = home
        if has_changed and unit.tensors:
            area = self._area_in_use(self.visiting)
            pairs = [(area, unit.whole)] if area is not None else list(zip(self._homes, unit.views, strict=True))
            self._sent[slot] = self._link.copy_out(pairs, self._device)
        self._homes, self.visiting = [], None

    def _area_in_use(self, number: int) -> torch.Tensor | None:
        """The area of a unit that is not on the device, if the data of all its tensors is at its place in the area."""
        area = self._areas[number].whole() if number in self._areas else None
        return area if area is not None and self._units[number].is_in(area) else None


class _Unit:
    """Tensors that are copied together, and their places in a buffer."""

    def __init__(self, tensors: Sequence[torch.Tensor], buffer: torch.Tensor) -> None:
        self.tensors, self.layout = list(tensors), _layout_of(tensors)
        begins, size = places_of(tensors)
        with torch.inference_mode(False), torch.no_grad():
            self.whole = buffer[:size]
            self.views = [
                laid_out(buffer[begin : begin + tensor.nbytes], tensor)
                for tensor, begin in zip(tensors, begins, strict=True)
            ]
        # a tensor without elements has no memory
        self._filled = [(tensor, begin) for tensor, begin in zip(tensors, begins, strict=True) if tensor.numel()]
        self._can_be_one = all(map(has_no_gaps, tensors))
        self._at, self._pointers = 0, [0] * len(self._filled)

    def is_in(self, area: torch.Tensor) -> bool:
        """Whether the data of the tensors is in an area of host memory, each at the same position as in the buffer."""
        at = area.data_ptr()
        if at != self._at:
            self._at, self._pointers = at, [at + begin for _, begin in self._filled]
        is_like_buffer = self._can_be_one and area.nbytes == self.whole.nbytes
        return is_like_buffer and [tensor.data_ptr() for tensor, _ in self._filled] == self._pointers


def _layout_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(id(tensor), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def empty_buffer(num_bytes: int, device: torch.device, part: str) -> torch.Tensor:
    """Device memory for a unit; `part` is its part of the anatomy in a trace."""
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
