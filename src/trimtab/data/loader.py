"""A prepared DataLoader: batches arrive on the device, the last one of an epoch is known, and its place is kept.

The loader given is iterated as it is: same sampler, same workers, same draws of random numbers, so that a prepared
loop sees the batches that the plain loop saw. Its place is (epoch, batches delivered) and the generators as they stood
when the epoch began; from these a map-style loader goes on in constant time, without loading what was seen.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.data.placement import Placement
from trimtab.log import say
from trimtab.randomness import RandomState, host_random_state, host_randomness_kept, restore_random_state

_NOTHING = object()
_UNREAD = object()


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
        # now, and the first index later: samplers draw their order at either, as with a plain DataLoader
        self._iterator: Iterator[Any] = iter(batches)
        self._num_skipped = num_skipped
        self._next: Any = _UNREAD
        self.num_issued = num_skipped
        self.last_size = 0  # rows of the batch issued last
        self.exhausted = False

    def prime(self) -> None:
        """Draw the order of the epoch and pass over what was delivered before."""
        if self._next is _UNREAD:
            for _ in range(self._num_skipped):
                next(self._iterator, None)
            self._read()

    def _read(self) -> None:
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
        self.last_size = len(indices) if hasattr(indices, "__len__") else 0
        self._read()
        return indices


class _IndexSource:
    """Stands in a DataLoader in the place of its batch sampler, and can start in the middle of an epoch."""

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self.num_skipped = 0
        self.holds_back = False  # gives nothing, so that workers can be started without work
        self.iterator: _IndexIterator | None = None

    def __iter__(self) -> _IndexIterator:
        self.iterator = _IndexIterator(() if self.holds_back else self._batches, self.num_skipped)
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
        self._iteration: object | None = None  # the iteration that has begun and not ended
        self._start: RandomState | None = None  # the generators when the epoch began that is being iterated
        self._resume: dict[str, Any] | None = None
        self._skip: int | None = None
        self._ahead: Any = _UNREAD  # a batch read before it was asked for, where only that tells the end
        self._last_read: dict[str, Any] | None = None  # what it takes to read that batch again
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

    def without_repeated_rows(self, gathered: Any, num_processes: int) -> Any:
        """Cut what was gathered from an epoch's last batch to the rows that it really had.

        Only tensors that are as long as a full batch are cut: a value repeated for each row of a batch, say.
        """
        full = (self.loader.batch_size or 0) * num_processes
        if not self.end_of_epoch or not full or self._indices is None:
            return gathered
        assert self._indices.iterator is not None
        num_rows = self._indices.iterator.last_size
        return gathered if num_rows in (0, full) else _first_rows(gathered, num_rows, full)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration counts as; samplers and datasets that listen are told."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        # not a generator itself: a DataLoader draws when `iter` is called, which `zip` of two loaders shows
        return self._deliver(self._begin_epoch())

    def _deliver(self, batches: Iterator[Any]) -> Iterator[Any]:
        iteration = self._iteration = object()
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
            if self._iteration is iteration:  # else the next one has begun before this one was given up
                self.num_delivered = 0
                self._start = None
                self._ahead = _UNREAD
                self.end_of_epoch = completed or self.end_of_epoch
                self._end_iteration()

    def _end_iteration(self) -> None:
        self._iteration = None
        if self._resume is None:  # a place that was loaded since knows its own epoch
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
        if self._ahead is _UNREAD:
            self._read_ahead(batches)
        while self._ahead is not _NOTHING:
            batch = self._ahead
            self._read_ahead(batches)
            self.num_delivered += 1
            self.end_of_epoch = self._ahead is _NOTHING
            yield self._place(batch)

    def _read_ahead(self, batches: Iterator[Any]) -> None:
        """Read a batch, and remember the generators and the data's own place before it.

        A resumed run reads it again from there: a batch of any type may come, and what collators draw is drawn again.
        """
        owner = self._owner_of_place()
        self._last_read = {"epoch": self.epoch, "random": self._random_state()}
        if owner is not None:
            self._last_read["source"] = copy.deepcopy(owner.state_dict())
        self._ahead = next(batches, _NOTHING)
        if owner is not None and self._ahead is _NOTHING:
            self._last_read["source_at_end"] = copy.deepcopy(owner.state_dict())

    def _owner_of_place(self) -> Any:
        """The loader or the dataset, if it has no indices and keeps its own place."""
        if self._indices is not None:
            return None
        if hasattr(self._source, "state_dict"):
            return self._source
        dataset = self._source.dataset
        return dataset if hasattr(dataset, "state_dict") and self._source.num_workers == 0 else None

    def _begin_epoch(self) -> Iterator[Any]:
        if self._iteration is not None:
            self._end_iteration()
        self.end_of_epoch, self._ahead = False, _UNREAD
        resume, self._resume = self._resume, None
        num_skipped, self._skip = self._skip, None
        if resume is not None:
            # What was drawn before the save is drawn again, and leaves no trace in the generators restored since.
            with self._randomness_kept():
                if "start" in resume:
                    num_batches = resume["num_delivered"] if num_skipped is None else num_skipped
                    return self._continue_epoch(resume, num_batches)
                self._return_to_boundary(resume)
        self._start = self._random_state() | {"has_workers": self._has_lasting_workers()}
        self._tell_epoch()
        return self._pass_over(num_skipped or 0)

    def _continue_epoch(self, resume: dict[str, Any], num_batches: int) -> Iterator[Any]:
        """The rest of an epoch that was saved, after its first `num_batches` batches."""
        start, last_read = resume["start"], resume.get("last_read")
        is_same_place = num_batches == resume["num_delivered"]
        self.epoch, self._start = resume["epoch"], start
        self._start_lasting_workers(start["has_workers"])
        self._restore_random_state(start)
        self._tell_epoch()
        if last_read is not None and "source" in last_read and is_same_place:
            self.num_delivered = num_batches
            return self._read_again(last_read)
        batches = self._pass_over(num_batches)
        if self._indices is not None:
            assert self._indices.iterator is not None
            self._indices.iterator.prime()
            return batches
        if last_read is not None and is_same_place:
            self._restore_random_state(last_read["random"])
        self._read_ahead(batches)
        return batches

    def _return_to_boundary(self, resume: dict[str, Any]) -> None:
        """Bring data and workers to where they were between two epochs, or before the first."""
        self._start_lasting_workers(resume["has_workers"])
        if "last_read" in resume:
            next_epoch, self.epoch = self.epoch, resume["last_read"]["epoch"]
            self._tell_epoch()
            self._read_again(resume["last_read"])
            self.epoch, self._ahead = next_epoch, _UNREAD

    def _read_again(self, last_read: dict[str, Any]) -> Iterator[Any]:
        """Let data that keeps its own place do again what it did last; the batch is `_ahead` then."""
        owner = self._owner_of_place()
        if "source_at_end" not in last_read:
            owner.load_state_dict(copy.deepcopy(last_read["source"]))
            batches = iter(self._source)
            self._restore_random_state(last_read["random"])
            self._read_ahead(batches)
            return batches
        # A state at the end of an epoch can mean two things: nothing is left, which one more iteration uses up; or
        # the next epoch, which that iteration would begin.
        owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        if next(iter(self._source), _NOTHING) is not _NOTHING:
            owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        self._last_read, self._ahead = last_read, _NOTHING
        return iter(())

    def _has_lasting_workers(self) -> bool:
        return bool(self._source.persistent_workers) and self._source._iterator is not None

    def _start_lasting_workers(self, had_workers: bool) -> None:
        """Have persistent workers just where the saved run had them: starting them draws a random number."""
        if not self._source.persistent_workers or had_workers == self._has_lasting_workers():
            return
        if not had_workers:
            self._source._iterator = None
            return
        if self._indices is not None:
            self._indices.holds_back = True
        iter(self._source)
        if self._indices is not None:
            self._indices.holds_back = False

    def _pass_over(self, num_batches: int) -> Iterator[Any]:
        """An epoch without its first `num_batches` batches; map-style data is not even loaded for them."""
        self.num_delivered = num_batches
        if self._indices is not None:
            self._indices.num_skipped = num_batches
            return iter(self._source)
        batches = iter(self._source)
        if num_batches:
            say(f"a dataset that cannot say its place is read again: {num_batches} batches are passed over")
            for _ in range(num_batches):
                next(batches, None)
        return batches

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

    @contextmanager
    def _randomness_kept(self) -> Iterator[None]:
        """Whatever is drawn inside leaves no trace, neither in the host's generators nor in the loader's own."""
        generators = [(generator, generator.get_state()) for generator in self._generators()]
        with host_randomness_kept():
            try:
                yield
            finally:
                for generator, state in generators:
                    generator.set_state(state)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, and what is needed to come back to it."""
        generators = [generator.get_state() for generator in self._generators()]
        if self._resume is not None:
            return {**self._resume, "epoch": self.epoch, "generators": generators}
        # with its last batch delivered an epoch is over, whether the loop has asked once more or not
        is_over = self._iteration is not None and self.end_of_epoch
        place = {
            "epoch": self.epoch + is_over,
            "num_delivered": 0 if is_over else self.num_delivered,
            "generators": generators,
            "has_workers": self._has_lasting_workers(),
        }
        has_begun = (
            not is_over and self._start is not None and (self._indices is not None or self._ahead is not _UNREAD)
        )
        if has_begun:
            place["start"] = self._start
        if self._last_read is not None and (has_begun or "source" in self._last_read):
            place["last_read"] = self._last_read
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a place that `state_dict` gave."""
        generators, saved = self._generators(), state["generators"]
        if len(generators) != len(saved):
            raise ValueError(f"the loader has {len(generators)} generators of its own, the saved one {len(saved)}")
        if self._owner_of_place() is None and "source" in state.get("last_read", {}):
            raise ValueError("the dataset had kept its own place, which this one (or one with workers) does not")
        self.epoch, self._resume, self._last_read = state["epoch"], state, state.get("last_read")
        for generator, saved_state in zip(generators, saved, strict=True):
            generator.set_state(saved_state)

    def undo_point(self) -> Callable[[], None]:
        """A function that takes `load_state_dict` back; a state dict would start the epoch being iterated again."""
        epoch, resume, last_read = self.epoch, self._resume, self._last_read
        generators = [(generator, generator.get_state()) for generator in self._generators()]

        def undo() -> None:
            self.epoch, self._resume, self._last_read = epoch, resume, last_read
            for generator, state in generators:
                generator.set_state(state)

        return undo


def _first_rows(value: Any, num_rows: int, full: int) -> Any:
    if isinstance(value, torch.Tensor):
        return value[:num_rows] if value.dim() and len(value) == full else value
    if isinstance(value, dict):
        return {key: _first_rows(item, num_rows, full) for key, item in value.items()}
    return type(value)(_first_rows(item, num_rows, full) for item in value)
