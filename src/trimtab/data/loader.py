"""A prepared DataLoader: batches arrive on the device, the last one of an epoch is known, and its place is kept.

The loader given is iterated as it is: same sampler, same workers, same draws of random numbers, so that a prepared
loop sees the batches that the plain loop saw. Its place is (epoch, batches delivered) and the generators as they stood
when the epoch began; from these a map-style loader goes on in constant time, without loading what was seen.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.data.placement import Placement
from trimtab.log import say
from trimtab.randomness import RandomState, host_random_state, host_randomness_kept, restore_random_state

_NOTHING = object()


class ActiveLoaders:
    """The prepared loaders that are being iterated now, innermost last: an evaluation may run inside an epoch."""

    def __init__(self) -> None:
        self._stack: list[PreparedLoader] = []

    @property
    def innermost(self) -> "PreparedLoader | None":
        """The loader whose batch was delivered most recently to the innermost loop."""
        return self._stack[-1] if self._stack else None

    def enter(self, loader: "PreparedLoader") -> None:
        """An epoch of `loader` begins."""
        self._stack.append(loader)

    def leave(self, loader: "PreparedLoader") -> None:
        """An epoch of `loader` ended, by exhaustion or by a break."""
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is loader:
                del self._stack[index]
                return


class _IndexIterator:
    """Index batches of one epoch, read one ahead, so that the last is known before it is loaded."""

    def __init__(self, batches: Any, num_skipped: int) -> None:
        self._source = batches
        self._num_skipped = num_skipped
        self._iterator: Iterator[Any] | None = None
        self._next: Any = _NOTHING
        self.num_issued = num_skipped
        self.exhausted = False

    def prime(self) -> None:
        """Draw the order of the epoch and pass over what was delivered before."""
        if self._iterator is None:
            self._iterator = iter(self._source)
            for _ in range(self._num_skipped):
                next(self._iterator, None)
            self._read()

    def _read(self) -> None:
        assert self._iterator is not None
        self._next = next(self._iterator, _NOTHING)
        self.exhausted = self._next is _NOTHING

    def __iter__(self) -> "_IndexIterator":
        return self

    def __next__(self) -> Any:
        self.prime()
        if self._next is _NOTHING:
            raise StopIteration
        indices = self._next
        self.num_issued += 1
        self._read()
        return indices


class _IndexSource:
    """Stands in a DataLoader in the place of its batch sampler, and can start in the middle of an epoch."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.num_skipped = 0
        self.iterator: _IndexIterator | None = None

    def __iter__(self) -> _IndexIterator:
        self.iterator = _IndexIterator(self._batches, self.num_skipped)
        return self.iterator

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)


class PreparedLoader:
    """A DataLoader whose batches arrive on the device and whose place in the data can be saved.

    Inside the loop the place is the middle of an epoch; once the loop was left, by exhaustion or by a break, it is the
    beginning of the next one.

    Args:
        loader: The DataLoader given to `prepare`.
        place: Brings a batch to the device.
        active: The engine's record of the loaders that are being iterated.
    """

    def __init__(self, loader: DataLoader[Any], place: Placement, active: ActiveLoaders) -> None:
        self.loader = loader
        self.epoch = 0
        self.num_delivered = 0
        self.end_of_epoch = False
        self._place = place
        self._active = active
        self._start: RandomState | None = None
        self._resume: dict[str, Any] | None = None
        self._skip: int | None = None
        self._ahead: Any = _NOTHING  # a batch read before it was asked for, where only that tells the end
        self._indices: _IndexSource | None = None
        self._source = self._instrumented(loader)

    def _instrumented(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A shallow copy of the loader that pins memory and, for map-style data, counts what it issues."""
        source = copy.copy(loader)
        object.__setattr__(source, "_iterator", None)
        if self._place.pins_memory:
            source.pin_memory = True
        if not isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "state_dict"):
            attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            self._indices = _IndexSource(getattr(loader, attribute))
            # DataLoader guards these names against assignment after construction; a copy may differ.
            object.__setattr__(source, attribute, self._indices)
        return source

    def __len__(self) -> int:
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_source"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def num_remaining(self) -> int | None:
        """Batches that are still to come in this epoch, or None where that cannot be known."""
        if self._indices is not None and self._indices.iterator is not None and self._indices.iterator.exhausted:
            return self._indices.iterator.num_issued - self.num_delivered
        if self._indices is None:
            return None
        try:
            return max(len(self.loader) - self.num_delivered, 0)
        except TypeError:
            return None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration counts as; samplers and datasets that listen are told."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        batches = self._begin_epoch()
        self._active.enter(self)
        completed = False
        try:
            if self._indices is not None:
                yield from self._known_end(batches)
            else:
                yield from self._end_found_by_reading_ahead(batches)
            completed = True
        finally:
            self._active.leave(self)
            self.num_delivered = 0
            self._start = None
            self._ahead = _NOTHING
            self.end_of_epoch = completed or self.end_of_epoch
            self.epoch += 1

    def _known_end(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self._indices is not None
        indices = self._indices.iterator
        assert indices is not None
        for batch in batches:
            self.num_delivered += 1
            self.end_of_epoch = indices.exhausted and self.num_delivered == indices.num_issued
            yield self._place(batch)

    def _end_found_by_reading_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._ahead is _NOTHING:
            self._ahead = next(batches, _NOTHING)
        while self._ahead is not _NOTHING:
            batch = self._ahead
            self._ahead = next(batches, _NOTHING)
            self.num_delivered += 1
            self.end_of_epoch = self._ahead is _NOTHING
            yield self._place(batch)

    def _begin_epoch(self) -> Iterator[Any]:
        self.end_of_epoch = False
        resume, self._resume = self._resume, None
        num_skipped, self._skip = self._skip, None
        if resume is not None and "source" in resume:
            return self._continue_stateful(resume)
        if resume is not None:
            # The epoch is drawn as it was when it began, and leaves no trace in the generators restored since.
            with host_randomness_kept():
                self.epoch, self._start = resume["epoch"], resume["start"]
                self._restore_random_state(resume["start"])
                return self._pass_over(resume["num_delivered"] if num_skipped is None else num_skipped)
        self._start = self._random_state()
        return self._pass_over(num_skipped or 0)

    def _pass_over(self, num_batches: int) -> Iterator[Any]:
        """An epoch without its first `num_batches` batches; map-style data is not even loaded for them."""
        self._tell_epoch()
        self.num_delivered = num_batches
        if self._indices is not None:
            self._indices.num_skipped = num_batches
            batches = iter(self._source)
            assert self._indices.iterator is not None
            self._indices.iterator.prime()
            return batches
        batches = iter(self._source)
        if num_batches:
            say(f"a dataset that cannot say its place is read again: {num_batches} batches are passed over")
            for _ in range(num_batches):
                next(batches, None)
        return batches

    def _continue_stateful(self, resume: dict[str, Any]) -> Iterator[Any]:
        """The rest of an epoch of data that keeps its own place."""
        self.epoch, self.num_delivered, self._start = (
            resume["epoch"],
            resume["num_delivered"],
            resume["start"],
        )
        owner: Any = self._source if hasattr(self._source, "state_dict") else self._source.dataset
        owner.load_state_dict(resume["source"])
        if not resume["ahead"]:  # the last batch had been delivered
            return iter(())
        self._ahead = resume["ahead"][0]
        return iter(self._source)

    def start_at(self, num_batches: int) -> None:
        """Let the next iteration begin after `num_batches` batches of its epoch.

        After `load_state` in the middle of an epoch the place is known already; this sets it, it does not add to it.
        """
        self._skip = num_batches

    def _tell_epoch(self) -> None:
        loader = self.loader
        listeners: tuple[Any, ...] = (
            loader.sampler,
            loader.batch_sampler,
            getattr(loader.batch_sampler, "sampler", None),
            loader.dataset,
        )
        for listener in {id(listener): listener for listener in listeners}.values():
            if hasattr(listener, "set_epoch"):
                listener.set_epoch(self.epoch)

    def _generators(self) -> list[torch.Generator]:
        loader = self.loader
        owners = (
            loader,
            loader.sampler,
            loader.batch_sampler,
            getattr(loader.batch_sampler, "sampler", None),
        )
        found = (getattr(owner, "generator", None) for owner in owners)
        return list(
            {id(generator): generator for generator in found if isinstance(generator, torch.Generator)}.values()
        )

    def _random_state(self) -> RandomState:
        return {"host": host_random_state(), "generators": [g.get_state() for g in self._generators()]}

    def _restore_random_state(self, state: RandomState) -> None:
        restore_random_state(state["host"])
        for generator, saved in zip(self._generators(), state["generators"], strict=True):
            generator.set_state(saved)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and what is needed to come back to it."""
        place: dict[str, Any] = {"epoch": self.epoch, "num_delivered": self.num_delivered}
        if self._resume is not None:
            return self._resume
        place["generators"] = [generator.get_state() for generator in self._generators()]
        if self._start is None:
            return place
        place["start"] = self._start
        if hasattr(self._source, "state_dict"):
            place["source"] = self._source.state_dict()
        elif hasattr(self._source.dataset, "state_dict") and self._source.num_workers == 0:
            place["source"] = self._source.dataset.state_dict()
        if "source" in place:
            place["ahead"] = [] if self._ahead is _NOTHING else [self._ahead]
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a place that `state_dict` gave."""
        self.epoch = state["epoch"]
        self._resume = state if "start" in state else None
        for generator, saved in zip(self._generators(), state.get("generators", []), strict=False):
            generator.set_state(saved)
