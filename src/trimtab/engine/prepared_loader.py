"""A prepared DataLoader: batches arrive on the device, the last one of an epoch is known, and its place is kept.

The loader given is iterated as it is: same sampler, same workers, same draws of random numbers, so that a prepared
loop sees the batches that the plain loop saw. Its place is (epoch, batches delivered) and the generators as they stood
when the epoch began; from these a map-style loader goes on in constant time, without loading what was seen.

With several processes all read the same order, the one that the first process draws, and each takes its part.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from trimtab.distributed.consistency import require_same
from trimtab.distributed.world import SoloWorld, World, concatenated, of_same_kind
from trimtab.engine.accelerate_sharding import AccelerateSharding
from trimtab.engine.index_batches import NOTHING, UNREAD, IndexSource
from trimtab.engine.placement import Placement
from trimtab.engine.sharding import MISSING, NoSharding, Shard, Sharding, SplitRows
from trimtab.errors import CheckpointError
from trimtab.log import say, say_once
from trimtab.randomness import RandomState, host_random_state, host_randomness_kept, restore_random_state


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


class PreparedLoader:
    """A DataLoader whose batches arrive on the device and whose place in the data can be saved.

    Inside the loop the place is the middle of an epoch; once the loop was left, by exhaustion or by a break, it is the
    beginning of the next one.

    Args:
        loader: The DataLoader given to `prepare`.
        place: Brings a batch to the device.
        active: The engine's record of the loaders that are being iterated.
        world: The processes that read the same data.
        sharding: Which part of a batch is this process's.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        place: Placement,
        active: ActiveLoaders,
        world: World | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        self.loader = loader
        self._world: World = world or SoloWorld()
        self._sharding = sharding or NoSharding()
        self._shard = Shard(None, (0,) * self._world.num_processes, self._world.process_index)
        self._is_compared = False  # the processes were seen to draw the same order
        self._common: RandomState | None = None  # what every process reads an iterable dataset with
        self.epoch = 0
        self.num_delivered = 0
        self.end_of_epoch = False
        self._place = place
        self._active = active
        self._iteration: object | None = None  # the iteration that has begun and not ended
        self._start: RandomState | None = None  # the generators when the epoch began that is being iterated
        self._resume: dict[str, Any] | None = None
        self._skip: int | None = None
        self._first_group: list[Any] = []  # what the epoch began with, of data without indices
        self._ahead: Any = UNREAD  # a batch read before it was asked for, where only that tells the end
        self._last_read: dict[str, Any] | None = None  # what it takes to read that batch again
        self._indices: IndexSource | None = None
        self._divides_loaded = True
        self._source = self._instrumented(loader)

    def _instrumented(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A shallow copy of the loader that pins memory, keeps order and, for map-style data, counts what it issues."""
        source = self._copy_of(loader)
        if not isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "state_dict"):
            attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            # a loader without batches gives rows, or batches that the dataset made: these are divided when loaded
            self._divides_loaded = attribute == "sampler" and isinstance(self._sharding, SplitRows)
            of_indices = NoSharding() if self._divides_loaded else self._sharding
            self._indices = IndexSource(getattr(loader, attribute), of_indices)
            # DataLoader guards these names against assignment after construction; a copy may differ.
            object.__setattr__(source, attribute, self._indices)
        return source

    def _copy_of(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        source = copy.copy(loader)
        object.__setattr__(source, "_iterator", None)
        if self._place.pins_memory:
            source.pin_memory = True
        if loader.num_workers and not loader.in_order:
            # Which batch a worker finished first cannot be saved, and differs from process to process.
            say_once(
                "DataLoader(in_order=False): batches come in the sampler's order all the same, so that a resumed run "
                "and other processes see each row once"
            )
            source.in_order = True
        return source

    def __len__(self) -> int:
        return self._sharding.num_shares(len(self.loader))

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_source"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    @property
    def batch_sampler(self) -> Any:
        """The loader's own, or, where batches are shared out as Accelerate does it, that of this process."""
        if self._indices is not None and isinstance(self._sharding, AccelerateSharding):
            return self._indices
        return self.loader.batch_sampler

    @property
    def end_of_dataloader(self) -> bool:
        """Accelerate's name for `end_of_epoch`."""
        return self.end_of_epoch

    @property
    def total_dataset_length(self) -> int:
        """Rows of the dataset, over all processes."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full batch, over all processes; None where the loader does not say."""
        size = self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None)
        return None if size is None else size * self._sharding.group_size

    def override_even_batches(self, is_even: bool) -> bool | None:
        """Choose whether every process has the same number of batches; None where that cannot be chosen.

        Returns:
            What was chosen before.
        """
        if self._indices is None or not isinstance(self._sharding, AccelerateSharding):
            return None
        before, self._sharding.is_even = self._sharding.is_even, is_even
        return before

    @property
    def num_remaining(self) -> int | None:
        """Batches that are still to come in this epoch, or None where that cannot be known."""
        if self._indices is not None and self._indices.iterator is not None and self._indices.iterator.exhausted:
            return self._indices.iterator.num_issued - self.num_delivered
        if self._indices is None:
            return None
        try:
            return max(len(self) - self.num_delivered, 0)
        except TypeError:
            return None

    @property
    def row_share(self) -> float:
        """This process's rows of the current batch, as a multiple of what each process has on average; 0: none."""
        return self._shard.row_share

    def real_rows(self, parts: list[Any]) -> Any:
        """What each process gave for the current batch, joined, without rows that only fill it up.

        A process without rows of its own gives nothing. Of the others only tensors as long as a full batch are cut: a
        value repeated for each row of a batch, say.
        """
        full = {self.loader.batch_size or 0, self._shard.num_held}
        if len(parts) > 1:
            full |= {-(-size // len(parts)) for size in full}
        rows_of_all = self._shard.rows_of_all if len(self._shard.rows_of_all) == len(parts) else (0,) * len(parts)
        if not any(rows_of_all):
            return concatenated(parts) if len(parts) > 1 else parts[0]
        cut = [_first_rows(part, num_rows, full) for part, num_rows in zip(parts, rows_of_all, strict=True)]
        return concatenated(cut) if len(cut) > 1 else cut[0]

    def own_objects(self, value: Any) -> Any:
        """A list with one object for each row of the current batch, without those of rows that only fill it up."""
        is_for_rows = isinstance(value, list) and len(value) == self._shard.num_held
        return value[: self._shard.num_rows] if is_for_rows else value

    @property
    def has_no_rows(self) -> bool:
        """Whether all rows of this process's batch only fill it up."""
        return self.row_share == 0 or (self._shard.num_held > 0 and self._shard.num_rows == 0)

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
                self._ahead = UNREAD
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
        for loaded in batches:
            batch = self._delivered(loaded, indices.issued.popleft())
            self.num_delivered += 1
            self.end_of_epoch = indices.exhausted and self.num_delivered == indices.num_issued
            self._tell_monitor()
            yield self._place(batch)

    def _tell_monitor(self) -> None:
        if self._world.num_processes > 1:
            self._world.monitor.did(f"batch {self.num_delivered} of epoch {self.epoch} of a loader")

    def _delivered(self, loaded: Any, shard: Shard) -> Any:
        if self._divides_loaded and self._world.num_processes > 1:
            shard = self._sharding.share_loaded([loaded], [loaded])
            loaded = shard.content
        self._shard = shard
        return loaded

    def _end_found_by_reading_ahead(self, batches: Iterator[Any]) -> Iterator[Any]:
        if self._ahead is UNREAD:
            self._read_ahead(batches)
        while self._ahead is not NOTHING:
            shard: Shard = self._ahead
            self._read_ahead(batches)
            self.num_delivered += 1
            self.end_of_epoch = self._ahead is NOTHING
            self._shard = shard
            self._tell_monitor()
            yield self._place(shard.content)

    def _read_ahead(self, batches: Iterator[Any]) -> None:
        """Read a batch, and remember the generators and the data's own place before it.

        A resumed run reads it again from there: a batch of any type may come, and what collators draw is drawn again.
        """
        owner = self._owner_of_place()
        with self._reading_alike():
            self._last_read = {"epoch": self.epoch, "random": self._random_state()}
            if owner is not None:
                self._last_read["source"] = copy.deepcopy(owner.state_dict())
            group = self._read_group(batches)
            self._ahead = self._sharding.share_loaded(group, self._first_group) if group else NOTHING
            if self._ahead is not NOTHING and self._ahead.content is MISSING:
                self._ahead = NOTHING
            if owner is not None and self._ahead is NOTHING:
                self._last_read["source_at_end"] = copy.deepcopy(owner.state_dict())

    def _read_group(self, batches: Iterator[Any]) -> list[Any]:
        """Batches of all processes, from data without indices."""
        group = list(islice(batches, self._sharding.group_size))
        if isinstance(self._sharding, AccelerateSharding) and not self._first_group:
            self._first_group = group
        return group

    def _iterate(self) -> Iterator[Any]:
        """The batches themselves, from the beginning of an epoch."""
        return iter(self._source)

    @contextmanager
    def _reading_alike(self) -> Iterator[None]:
        """Several processes read one stream with the same random numbers, which leave no trace in their own."""
        if self._world.num_processes == 1:
            yield
            return
        with host_randomness_kept():
            assert self._common is not None
            restore_random_state(self._common)
            yield
            self._common = host_random_state()

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
        self.end_of_epoch, self._ahead, self._first_group = False, UNREAD, []
        resume, self._resume = self._resume, None
        num_skipped, self._skip = self._skip, None
        if resume is not None:
            self._common = resume.get("common", self._common)
            # What was drawn before the save is drawn again, and leaves no trace in the generators restored since.
            with self._randomness_kept():
                if "start" in resume:
                    num_batches = resume["num_delivered"] if num_skipped is None else num_skipped
                    return self._continue_epoch(resume, num_batches)
                self._return_to_boundary(resume)
        with self._drawing_alike():
            self._start = self._random_state() | {"has_workers": self._has_lasting_workers()}
            self._tell_epoch()
            return self._pass_over(num_skipped or 0)

    @contextmanager
    def _drawing_alike(self) -> Iterator[None]:
        """Every process draws the order that the first one draws; their own random numbers stay as they were.

        Accelerate sends the state of the sampler's generator alone, and lets every process draw the rest by itself.
        """
        if self._world.num_processes == 1:
            yield
            return
        if self._indices is not None and isinstance(self._sharding, AccelerateSharding):
            states = self._world.object_of_first([generator.get_state() for generator in self._generators()])
            for generator, state in zip(self._generators(), states, strict=True):
                generator.set_state(state)
            yield
            assert self._indices.iterator is not None
            self._indices.iterator.prime()
            self._require_same_order(self._indices.iterator.group)
            return
        own = host_random_state()
        first = self._world.object_of_first(self._random_state())
        if self._indices is None:
            self._common = self._common or first["host"]
            first = {**first, "host": self._common}
        self._restore_random_state(first)
        yield
        if self._indices is not None and self._indices.iterator is not None:
            self._indices.iterator.prime()
            self._require_same_order(self._indices.iterator.group)
        else:
            self._common = host_random_state()
        if self._world.process_index > 0 or self._indices is None:
            restore_random_state(own)

    def _require_same_order(self, group: list[Any]) -> None:
        if isinstance(self._sharding, NoSharding) or self._is_compared:
            return  # divided before it came here: each process has its own rows
        self._is_compared = True
        first = [list(batch)[:8] if hasattr(batch, "__iter__") else batch for batch in group]
        require_same(
            self._world,
            "the order of their data",
            {"first rows": first},
            "seed the sampler alike on every process, or give it a generator or a set_epoch method",
        )

    def _continue_epoch(self, resume: dict[str, Any], num_batches: int) -> Iterator[Any]:
        """The rest of an epoch that was saved, after its first `num_batches` batches."""
        start, last_read = resume["start"], resume.get("last_read")
        is_same_place = num_batches == resume["num_delivered"]
        if last_read is not None and is_same_place:
            self._common = last_read["random"]["host"]
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
            self.epoch, self._ahead = next_epoch, UNREAD

    def _read_again(self, last_read: dict[str, Any]) -> Iterator[Any]:
        """Let data that keeps its own place do again what it did last; the batch is `_ahead` then."""
        owner = self._owner_of_place()
        if "source_at_end" not in last_read:
            owner.load_state_dict(copy.deepcopy(last_read["source"]))
            batches = self._iterate()
            self._restore_random_state(last_read["random"])
            self._read_ahead(batches)
            return batches
        # A state at the end of an epoch can mean two things: nothing is left, which one more iteration uses up; or
        # the next epoch, which that iteration would begin.
        owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        if next(self._iterate(), NOTHING) is not NOTHING:
            owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        self._last_read, self._ahead = last_read, NOTHING
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
            return self._iterate()
        batches = self._iterate()
        if num_batches:
            say(f"a dataset that cannot say its place is read again: {num_batches} batches are passed over")
            for _ in range(num_batches):
                self._read_group(batches)
        return batches

    def start_at(self, num_batches: int) -> None:
        """Let the next iteration begin after `num_batches` batches of its epoch.

        After `load_state` in the middle of an epoch the place is known already; this sets it, it does not add to it.
        """
        self._skip = num_batches

    def go_to(self, epoch: int, num_batches: int) -> None:
        """Let the next iteration be that of an epoch, after its first `num_batches` batches."""
        if self._resume is not None and self._resume["epoch"] != epoch:
            self._resume = None
        self._iteration = None  # one that is still open counts no more
        self.set_epoch(epoch)
        self.start_at(num_batches)

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
            "group_size": self._sharding.group_size,
        }
        if self._common is not None:
            place["common"] = self._common
        has_begun = not is_over and self._start is not None and (self._indices is not None or self._ahead is not UNREAD)
        if has_begun:
            place["start"] = self._start
        if self._last_read is not None and (has_begun or "source" in self._last_read):
            place["last_read"] = self._last_read
        return place

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a place that `state_dict` gave."""
        generators, saved = self._generators(), state["generators"]
        if len(generators) != len(saved):
            raise CheckpointError(
                f"the loader has {len(generators)} generators of its own, the saved one {len(saved)}: it was another "
                "loader, or one that another number of processes has shared out",
                "prepare the same objects in the same order; for another number of processes make the loader with "
                "DataLoader(…, generator=torch.Generator()), or with use_seedable_sampler=True, before it is saved",
            )
        if self._owner_of_place() is None and "source" in state.get("last_read", {}):
            raise ValueError("the dataset had kept its own place, which this one (or one with workers) does not")
        state = {**state, **self._counted_in_own_groups(state)}
        self.epoch, self._resume, self._last_read = state["epoch"], state, state.get("last_read")
        for generator, saved_state in zip(generators, saved, strict=True):
            generator.set_state(saved_state)

    def _counted_in_own_groups(self, state: dict[str, Any]) -> dict[str, int]:
        """Batches delivered, where another number of processes, which took whole batches each, has counted them."""
        own, theirs = self._sharding.group_size, state.get("group_size", self._sharding.group_size)
        num_read = state["num_delivered"] * theirs
        if num_read % own:
            raise CheckpointError(
                f"the state was saved after {num_read} batches of an epoch, which {own} processes that take whole "
                "batches do not come by",
                f"load it on a number of processes that divides {num_read}, or use Engine(split_batches=True)",
            )
        return {"num_delivered": num_read // own, "group_size": own}

    def undo_point(self) -> Callable[[], None]:
        """A function that takes `load_state_dict` back; a state dict would start the epoch being iterated again."""
        epoch, resume, last_read = self.epoch, self._resume, self._last_read
        generators = [(generator, generator.get_state()) for generator in self._generators()]

        def undo() -> None:
            self.epoch, self._resume, self._last_read = epoch, resume, last_read
            for generator, state in generators:
                generator.set_state(state)

        return undo


def _first_rows(value: Any, num_rows: int, full: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        if not value.dim() or (num_rows and (len(value) not in full or len(value) < num_rows)):
            return value
        return value[:num_rows]
    if isinstance(value, Mapping):
        return of_same_kind(value, {key: _first_rows(item, num_rows, full) for key, item in value.items()})
    return type(value)(_first_rows(item, num_rows, full) for item in value)
