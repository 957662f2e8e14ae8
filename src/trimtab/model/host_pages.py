"""Host memory for tensors that are moved off their device, and the copies to it and back.

Host memory is a pool of equally large pages, pinned for an NVIDIA GPU, so that copies overlap with computation. Pages
are allocated once and used again in every step, for tensors of any size: a large tensor takes several pages, and small
ones share a page. The size of a page is a power of two, because torch rounds pinned memory up to one.
"""

from typing import Any

import torch

from trimtab.errors import summarize_error
from trimtab.log import say
from trimtab.units import format_bytes

PAGE_BYTES = 2**23
Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # the tensor that a copy writes, and the one that it reads


class HostPages:
    """A pool of pages.

    Args:
        pins: Whether pages are pinned; if that fails, further pages are ordinary memory.
        page_bytes: The size of a page.
    """

    def __init__(self, *, pins: bool, page_bytes: int = PAGE_BYTES) -> None:
        self.page_bytes = page_bytes
        self.num_pages = 0  # existing pages, in use or not
        self._pins = pins
        self._free: list[torch.Tensor] = []

    @property
    def num_free(self) -> int:
        """Pages that are not in use."""
        return len(self._free)

    def take(self) -> torch.Tensor:
        """Return a page, as bytes."""
        if self._free:
            return self._free.pop()
        page = self._pinned() if self._pins else None
        page = torch.empty(self.page_bytes, dtype=torch.uint8, device="cpu") if page is None else page
        self.num_pages += 1
        return page

    def give(self, pages: list[torch.Tensor]) -> None:
        """Return pages to the pool."""
        self._free += pages

    def _pinned(self) -> torch.Tensor | None:
        try:
            return torch.empty(self.page_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._pins = False
            say(
                f"{format_bytes(self.num_pages * self.page_bytes)} of host memory are pinned, and more cannot be "
                f"({summarize_error(error)}): activations beyond that go to ordinary memory, whose copies are slower "
                "and do not overlap with computation; see ulimit -l and the memory limit of the container"
            )
            return None


class HostRoom:
    """Pages that several tensors share; they return to the pool when nothing refers to this object any more."""

    def __init__(self, pool: HostPages) -> None:
        self._pool = pool
        self._pages: list[torch.Tensor] = []
        self._num_free = 0  # bytes at the end of the last page

    def spans(self, num_bytes: int) -> list[torch.Tensor]:
        """Unused parts of pages, `num_bytes` in all."""
        found = []
        while num_bytes:
            if not self._num_free:
                self._pages.append(self._pool.take())
                self._num_free = self._pool.page_bytes
            first = self._pool.page_bytes - self._num_free
            size = min(num_bytes, self._num_free)
            found.append(self._pages[-1][first : first + size])
            # the next tensor starts at a multiple of 16 bytes, which is faster for device copies
            self._num_free -= min(self._num_free, -(-size // 16) * 16)
            num_bytes -= size
        return found

    def __del__(self) -> None:
        self._pool.give(self._pages)


class HostLink:
    """Copies between a device and pages, on a stream for each direction if the device is an NVIDIA GPU.

    Its methods return an event that completes with the copy; None if the copy is already done. The tensor that is sent
    must stay alive until the current stream has waited for the event. The tensor that is fetched belongs to the current
    stream, which has to wait for the event before it reads it, and before its memory is freed.
    """

    def __init__(self) -> None:
        self._streams: dict[tuple[torch.device, str], Any] = {}

    def __deepcopy__(self, memo: Any) -> "HostLink":
        return self  # copies of a model share the streams

    def send(self, source: torch.Tensor, room: HostRoom) -> tuple[list[torch.Tensor], Any]:
        """Copy bytes of a device into a room; return their location."""
        spans = room.spans(source.numel())
        parts = torch.split(source, [span.numel() for span in spans])
        return spans, self._copy(list(zip(spans, parts, strict=True)), source.device, "out")

    def fetch(self, spans: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Any]:
        """Copy what was sent into new memory of the device."""
        sizes = [span.numel() for span in spans]
        made = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        return made, self._copy(list(zip(torch.split(made, sizes), spans, strict=True)), device, "in")

    def copy_in(self, pairs: Pairs, device: torch.device, after: Any = None) -> Any:
        """Copy host tensors into existing device memory; `after` is an event to wait for first."""
        return self._copy(pairs, device, "in", after)

    def copy_out(self, pairs: Pairs, device: torch.device) -> Any:
        """Copy tensors of the device into existing host memory, which the host may read after `synchronize`."""
        return self._copy(pairs, device, "out")

    def synchronize(self, device: torch.device) -> None:
        """Wait for all copies (a host-device sync): the host may then read, change and free its memory."""
        for direction in ("in", "out"):
            stream = self._streams.get((device, direction))
            if stream is not None:
                stream.synchronize()

    def wait_sent(self, event: Any) -> None:
        """Let the current stream wait for a copy to the host."""
        _wait(event)

    def wait_fetched(self, event: Any) -> None:
        """Let the current stream wait for a copy from the host."""
        _wait(event)

    def _copy(self, parts: Pairs, device: torch.device, direction: str, after: Any = None) -> Any:
        if device.type != "cuda":
            for target, source in parts:
                target.copy_(source)
            return None
        stream = self._streams.get((device, direction))
        if stream is None:
            stream = self._streams[device, direction] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # when the current stream gets here, the data to send is computed, and the memory to fetch into is free
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            for target, source in parts:
                target.copy_(source, non_blocking=True)
            return stream.record_event()


def _wait(event: Any) -> None:
    if isinstance(event, torch.cuda.Event):
        torch.cuda.current_stream().wait_event(event)
