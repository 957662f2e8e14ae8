"""Batches of indices, read one ahead: the last one of an epoch is known before its rows are loaded.

They stand in a DataLoader in the place of its batch sampler; each process takes its part of them.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from trimtab.engine.sharding import MISSING, Shard, Sharding

NOTHING = object()  # in the place of a batch: the epoch is over
UNREAD = object()  # the next batch was not read yet


class IndexIterator:
    """Index batches of one epoch, read one ahead, so that the last is known before it is loaded."""

    def __init__(self, batches: Any, num_skipped: int, sharding: Sharding) -> None:
        # now, and the first index later: samplers draw their order at either, as with a plain DataLoader
        self._iterator: Iterator[Any] = iter(batches)
        self._num_skipped = num_skipped
        self._sharding = sharding
        self._next: Any = UNREAD
        self.group: list[Any] = []  # what all processes read next
        self._first: list[Any] = []  # what they read first
        self.num_issued = num_skipped
        self.issued: deque[Shard] = deque()  # not delivered yet: workers are given their indices ahead
        self.exhausted = False

    def prime(self) -> None:
        """Draw the order of the epoch and pass over what was delivered before."""
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
    """Stands in a DataLoader in the place of its batch sampler, and can start in the middle of an epoch."""

    def __init__(self, batches: Any, sharding: Sharding) -> None:
        self._batches = batches
        self._sharding = sharding
        self.num_skipped = 0
        self.holds_back = False  # gives nothing, so that workers can be started without work
        self.iterator: IndexIterator | None = None

    def __iter__(self) -> IndexIterator:
        self.iterator = IndexIterator(() if self.holds_back else self._batches, self.num_skipped, self._sharding)
        return self.iterator

    def __len__(self) -> int:
        return self._sharding.num_shares(len(self._batches))

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader that was prepared."""
        return self._batches

    @property
    def even_batches(self) -> bool:
        """Whether every process has the same number of batches."""
        return bool(getattr(self._sharding, "is_even", True))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)
