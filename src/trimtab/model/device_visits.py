"""Tensors that live in host memory and visit a device, unit by unit, in buffers that take turns.

While the tensors of one unit are in use, those of the next are copied to another buffer, on a separate stream. With
two buffers, what comes has to wait until what was changed before has been copied back; with three it need not. A tensor
keeps its identity: only its data is exchanged, between host memory and a fixed place in a buffer.

If the data of a unit is where `host_areas.move_to_area` put it, the unit is copied as one piece. If anything has
replaced the data of a tensor since then, its tensors are copied one by one, from and to where they are.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trimtab.model.host_areas import HostArea, has_no_gaps, laid_out, places_of
from trimtab.model.host_pages import HostLink


class Visits:
    """Tensors in host memory, in units that visit the device one after the other.

    Args:
        device: The device.
        link: Copies between both.
        part: What the tensors are in the anatomy of memory: "weights" or "state".
        num_buffers: Units whose memory is on the device.
    """

    def __init__(self, device: torch.device, link: HostLink, part: str, num_buffers: int = 2) -> None:
        self._device, self._link, self._part = device, link, part
        self._num_buffers = num_buffers
        self._units: list[_Unit] = []
        self._areas: dict[int, HostArea] = {}  # of units that were moved to one area
        self._buffers: list[torch.Tensor] = []
        self._held: list[int | None] = [None] * num_buffers  # the unit whose values a buffer has, or gets
        self._arrived: list[Any] = [None] * num_buffers  # events of copies that were not waited for
        self._sent: list[Any] = [None] * num_buffers  # events of copies back to the host
        self._homes: list[torch.Tensor] = []  # host memory of the visiting unit
        self.visiting: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self, tensors: Sequence[Sequence[torch.Tensor]]) -> None:
        """Invalidate the buffers, because values in host memory may have changed. Allocates the buffers.

        Args:
            tensors: The tensors of each unit; their data is host memory while the unit does not visit.
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
        """Note that the data of a unit's tensors is in one area of host memory, as `host_areas.places_of` says."""
        self._areas[number] = area

    def fetch(self, number: int) -> None:
        """Start to copy a unit to its buffer, unless there is no such unit or it is there."""
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
        """Let the tensors of a unit be on the device; the current stream waits until they are."""
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
        """Let the tensors of the visiting unit be in host memory again, with their new values if they have changed."""
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
        """The area of a unit at rest, if the data of all its tensors is at its place there."""
        area = self._areas[number].whole() if number in self._areas else None
        return area if area is not None and self._units[number].is_in(area) else None


class _Unit:
    """Tensors that visit together, and their places in a buffer."""

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
        """Whether the data of the tensors is in an area of host memory, each at the place that it has in the buffer."""
        at = area.data_ptr()
        if at != self._at:
            self._at, self._pointers = at, [at + begin for _, begin in self._filled]
        is_like_buffer = self._can_be_one and area.nbytes == self.whole.nbytes
        return is_like_buffer and [tensor.data_ptr() for tensor, _ in self._filled] == self._pointers


def _layout_of(tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
    return [(id(tensor), tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def empty_buffer(num_bytes: int, device: torch.device, part: str) -> torch.Tensor:
    """Memory of the device for a unit; `part` is for the anatomy of a trace."""
    with torch.inference_mode(False):
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
