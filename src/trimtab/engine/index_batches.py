"""Read index batches one ahead, so that the last one of an epoch is known before its rows are loaded.

They replace the batch sampler of a DataLoader and give each process its part.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from trimtab.engine.sharding import MISSING, Shard, Sharding

NOTHING = object()  # instead of a batch: the epoch is over
UNREAD = object()  # instead of a batch: not read yet


class IndexIterator:
    """The index batches of one epoch, read one ahead."""

    def __init__(self, batches: Any, num_skipped: int, sharding: Sharding) -> None:
        # call `iter` now and read the first index later, like a plain DataLoader: samplers may draw their order at
        # either time
        self._iterator: Iterator[Any] = iter(batches)
        self._num_skipped = num_skipped
        self._sharding = sharding
        self._next: Any = UNREAD
        self.group: list[Any] = []  # the next batches of all processes
        self._first: list[Any] = []  # the first batches of all processes
        self.num_issued = num_skipped
        self.issued: deque[Shard] = deque()  # issued but not delivered: workers get their indices ahead of time
        self.exhausted = False

    def prime(self) -> None:
        """Draw the order of the epoch and skip the batches that were delivered before."""
        if self._next is UNREAD:
            for _ in range(self._num_skipped):
                self._next_group()
            self._read()

    def _next_group(self) -> list[Any]:
        group = list(islice(self._iterator, self._sharding.group_size))
        self._first = self._first or group
        return group

    def _read(self) -> None:
        self.group = self._next_group()
        self._next = self._sharding.share_indices(self.group, self._first) if self.group else NOTHING
        if self._next is not NOTHING and self._next.content is MISSING:
            self._next = NOTHING
        self.exhausted = self._next is NOTHING

    def __iter__(self) -> "IndexIterator":
        return self

    def __next__(self) -> Any:
        self.prime()
        if self._next is NOTHING:
            raise StopIteration
        shard = self._next
        self.num_issued += 1
        self.issued.append(shard)
        self._read()
        return shard.content


class IndexSource:
    """Replaces the batch sampler of a DataLoader, and can start in the middle of an epoch."""

    def __init__(self, batches: Any, sharding: Sharding) -> None:
        self._batches = batches
        self._sharding = sharding
        self.num_skipped = 0
        self.holds_back = False  # yields nothing, to start workers without work
        self.iterator: IndexIterator | None = None

    def __iter__(self) -> IndexIterator:
        self.iterator = IndexIterator(() if self.holds_back else self._batches, self.num_skipped, self._sharding)
        return self.iterator

    def __len__(self) -> int:
        return self._sharding.num_shares(len(self._batches))

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader given to `prepare`; Accelerate's name."""
        return self._batches

    @property
    def even_batches(self) -> bool:
        """Whether every process has the same number of batches; Accelerate's name."""
        return bool(getattr(self._sharding, "is_even", True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)
