"""A prepared loader whose data is read by the main process only; the other processes receive their part from it.

It is for data that is expensive to read, that only one process can read, or whose order differs with each read.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from trimtab.engine.prepared_loader import PreparedLoader, copy_loader


class DispatchedLoader(PreparedLoader):
    """A prepared loader whose batches come from the main process."""

    def _instrumented(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a copy without index batches; on the other processes it never starts a worker."""
        source = copy_loader(loader, self._placement.pins_memory)
        if self._world.process_index > 0:
            object.__setattr__(source, "persistent_workers", False)
            object.__setattr__(source, "num_workers", 0)
        return source

    def _iterate(self) -> Iterator[Any]:
        return super()._iterate() if self._world.process_index == 0 else iter(())

    def _read_group(self, batches: Iterator[Any]) -> list[Any]:
        group = self._world.broadcast_object(super()._read_group(batches))
        self._first_group = self._first_group or group
        return group
