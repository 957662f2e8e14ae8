"""A prepared DataLoader: it delivers batches on the device, knows the last one of an epoch, and saves its position.

The given loader is iterated without changes: same sampler, same workers, same random numbers, so a prepared loop gets
the batches of the plain loop. A position is (epoch, batches delivered) and the random state at the start of the epoch;
from these a map-style loader resumes in constant time, without loading rows that were already delivered.

With several processes, all read the rows in the order that rank 0 draws, and each takes its part.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trimtab.distributed.consistency import require_same
from trimtab.distributed.world import World
from trimtab.engine.accelerate_sharding import AccelerateSharding
from trimtab.engine.index_batches import NOTHING, UNREAD, IndexIterator, IndexSource
from trimtab.engine.loader_random_state import LoaderRandomState, set_epoch
from trimtab.engine.placement import Placement
from trimtab.engine.sharding import MISSING, NoSharding, Shard, Sharding, SplitRows, count_rows
from trimtab.errors import CheckpointError
from trimtab.log import log_info_once, say
from trimtab.randomness import RandomState, host_random_state, preserve_host_random_state, restore_random_state


class ActiveLoaders:
    """The prepared loaders being iterated, innermost last: an evaluation may run inside a training epoch."""

    def __init__(self) -> None:
        self._stack: list[PreparedLoader] = []

    @property
    def innermost(self) -> "PreparedLoader | None":
        """The loader of the innermost loop."""
        return self._stack[-1] if self._stack else None

    def enter(self, loader: "PreparedLoader") -> None:
        """Add a loader whose epoch begins."""
        self._stack.append(loader)

    def leave(self, loader: "PreparedLoader") -> None:
        """Remove a loader whose epoch has ended, by exhaustion or by a break."""
        for index in range(len(self._stack) - 1, -1, -1):
            if self._stack[index] is loader:
                del self._stack[index]
                return


class PreparedLoader:
    """A DataLoader that delivers batches on the device and can save its position in the data.

    Inside the loop the position is in the middle of an epoch. After the loop ends, by exhaustion or by a break, it is
    the start of the next epoch.

    Args:
        loader: The DataLoader given to `prepare`.
        placement: Moves a batch to the device.
        active: The loaders of the engine that are being iterated.
        world: The processes that read the same data.
        sharding: Chooses this process's part of a batch.
        reads_ahead: Whether rows that this process loads are loaded one batch ahead, as in Accelerate: transforms and
            collators draw random numbers before the model draws those of the batch before.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        placement: Placement,
        active: ActiveLoaders,
        world: World | None = None,
        sharding: Sharding | None = None,
        reads_ahead: bool = False,
    ) -> None:
        self.loader = loader
        self._world: World = world or World()
        self._sharding = sharding or NoSharding()
        self.shard = Shard(None, (0,) * self._world.num_processes, self._world.process_index)  # the current batch
        self._is_compared = False  # whether the processes were checked to draw the same order
        self._common: RandomState | None = None  # the random state with which all processes read an iterable dataset
        self.epoch = 0
        self.num_delivered = 0
        self.end_of_epoch = False
        self._placement = placement
        self._active = active
        self._random = LoaderRandomState(loader)
        self._iteration: object | None = None  # identifies the iteration that has started and not ended
        self._start: RandomState | None = None  # the random state at the start of the current epoch
        self._resume: dict[str, Any] | None = None
        self._skip: int | None = None
        self.when_moved: Callable[[], None] | None = None  # called if a loaded position is replaced by another one
        self.resumed_at: tuple[int, int] | None = None  # epoch and batches of a loaded position, until one is used
        self._first_group: list[Any] = []  # the first batches of the epoch, for data without indices
        self._ahead: Any = UNREAD  # a batch read ahead; without indices, only reading finds the end
        self._last_read: dict[str, Any] | None = None  # the state needed to read that batch again
        self._indices: IndexSource | None = None
        self._divides_loaded = True
        self._source = self._instrumented(loader)
        self._reads_ahead = self._indices is None or (reads_ahead and loader.num_workers == 0)

    def _instrumented(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """Return a shallow copy that pins memory, keeps order and, for map-style data, counts index batches."""
        source = copy_loader(loader, self._placement.pins_memory)
        if not isinstance(loader.dataset, IterableDataset) and not hasattr(loader, "state_dict"):
            attribute = "batch_sampler" if loader.batch_sampler is not None else "sampler"
            # without a batch sampler, indices are single rows or whole batches of the dataset, which are divided after
            # loading
            self._divides_loaded = attribute == "sampler" and isinstance(self._sharding, SplitRows)
            of_indices = NoSharding() if self._divides_loaded else self._sharding
            self._indices = IndexSource(getattr(loader, attribute), of_indices)
            # DataLoader forbids assignment to these names after construction; this is a copy
            object.__setattr__(source, attribute, self._indices)
        return source

    def __len__(self) -> int:
        return self._sharding.num_shares(len(self.loader))

    def __getattr__(self, name: str) -> Any:
        if name in ("loader", "_source"):
            raise AttributeError(name)
        return getattr(self.loader, name)

    # ------------------------------------------------------------------ facts about the loader and the current batch

    @property
    def batch_sampler(self) -> Any:
        """The batch sampler of the loader; with Accelerate's sharding, the one of this process."""
        if self._indices is not None and isinstance(self._sharding, AccelerateSharding):
            return self._indices
        return self.loader.batch_sampler

    @property
    def end_of_dataloader(self) -> bool:
        """Accelerate's name for `end_of_epoch`."""
        return self.end_of_epoch

    @property
    def total_dataset_length(self) -> int:
        """Rows of the dataset."""
        return len(self.loader.dataset)  # type: ignore[arg-type]

    @property
    def total_batch_size(self) -> int | None:
        """Rows of a full batch over all processes; None if the loader has no batch size."""
        size = self.loader.batch_size or getattr(self.loader.batch_sampler, "batch_size", None)
        return None if size is None else size * self._sharding.group_size

    @property
    def num_remaining(self) -> int | None:
        """Batches left in this epoch; None if unknown."""
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
        """This process's rows of the current batch divided by the average of all processes; 0 without rows."""
        return self.shard.row_share

    def override_even_batches(self, is_even: bool) -> bool | None:
        """Set whether every process has the same number of batches.

        Returns:
            The previous setting; None if it cannot be changed.
        """
        if self._indices is None or not isinstance(self._sharding, AccelerateSharding):
            return None
        before, self._sharding.is_even = self._sharding.is_even, is_even
        return before

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; it is passed to samplers and datasets with a `set_epoch` method."""
        self.epoch = epoch

    def start_at(self, num_batches: int) -> None:
        """Make the next iteration start after `num_batches` batches of its epoch.

        The position is absolute: after `load_state` in the middle of an epoch, it is not added to the loaded position.
        """
        self._skip = num_batches

    def report_skipped(self) -> None:
        """Warn at the first backward after `load_state` if the loop has skipped as many batches as the loaded position.

        A loop that reads all batches of an accumulation window first has skipped fewer.
        """
        assert self.resumed_at is not None
        (epoch, position), self.resumed_at = self.resumed_at, None
        num_unused = self.num_delivered - 1 - position
        if self.epoch != epoch or 0 < position <= num_unused:
            what = "the rest of the epoch" if self.epoch != epoch else f"the next {num_unused} batches"
            say(
                f"load_state put the loader after batch {position} of epoch {epoch}, and the loop then skipped {what}: "
                "they are not trained on. Remove `if step < resume_step: continue`, or call skip_first_batches instead"
            )

    def go_to(self, epoch: int, num_batches: int) -> None:
        """Make the next iteration start in an epoch, after its first `num_batches` batches."""
        if self._resume is not None and self._resume["epoch"] != epoch:
            self._resume = None
        self._iteration = None  # an open iteration must not advance the epoch when it ends
        self.set_epoch(epoch)
        self.start_at(num_batches)

    # ------------------------------------------------------------------ iteration

    def __iter__(self) -> Iterator[Any]:
        # a generator: nothing is drawn, read or skipped before the first `next`, because progress bars such as
        # tqdm.auto's call `iter` twice and use one of the two
        batches = self._begin_epoch()
        iteration = self._iteration = object()
        self._active.enter(self)
        completed = False
        try:
            if self._reads_ahead:
                yield from self._deliver_read_ahead(batches, iteration)
            else:
                yield from self._deliver_indexed(batches)
            completed = True
        finally:
            self._active.leave(self)
            if self._iteration is iteration:  # else the next iteration started before this one was closed
                self.num_delivered = 0 if self._resume is None else self._resume["num_delivered"]
                self._start = None
                self._ahead = UNREAD
                self.end_of_epoch = completed or self.end_of_epoch
                self._end_iteration()

    def _end_iteration(self) -> None:
        self._iteration = None
        if self._resume is None:  # a position loaded since then has its own epoch
            self.epoch += 1

    def _deliver_indexed(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self._indices is not None
        indices = self._indices.iterator
        for loaded in batches:
            if self._source.persistent_workers:  # iterations that are open at once share the latest one's batches
                indices = self._indices.iterator
            assert indices is not None
            self.shard = indices.issued.popleft()
            if self._divides_loaded and self._world.num_processes > 1:
                self.shard = self._sharding.share_loaded([loaded], [loaded])
                loaded = self.shard.content
            if indices is self._indices.iterator:  # the position is that of the latest iteration
                self.num_delivered = indices.num_issued - len(indices.issued)
            self.end_of_epoch = indices.exhausted and not indices.issued
            self._tell_monitor()
            yield self._placement(loaded)

    def _deliver_read_ahead(self, batches: Iterator[Any], iteration: object) -> Iterator[Any]:
        indices = None if self._indices is None else self._indices.iterator
        ahead = self._read_ahead(batches) if self._ahead is UNREAD else self._ahead
        while ahead is not NOTHING:
            shard: Shard = ahead
            if self._iteration is iteration:
                ahead = self._read_ahead(batches)
                self.num_delivered += 1
            else:  # a later iteration has started: the position is its own
                ahead = self._read_share(batches, indices)
            self.end_of_epoch = ahead is NOTHING
            if self.end_of_epoch and not any(shard.rows_of_all):  # only a last batch is short, as in Accelerate
                shard = replace(shard, rows_of_all=(count_rows(shard.content) or 0,) * len(shard.rows_of_all))
            self.shard = shard
            self._tell_monitor()
            yield self._placement(shard.content)

    def _tell_monitor(self) -> None:
        if self._world.num_processes > 1:
            self._world.monitor.did(f"batch {self.num_delivered} of epoch {self.epoch} of a loader")

    def _read_ahead(self, batches: Iterator[Any]) -> Any:
        """Read this process's part of the next batch; first store the random state and the dataset's own position.

        A resumed run reads the batch again from there. The batch itself is not saved, because it may have any type, and
        the collator draws its random numbers again.
        """
        owner = self._position_owner()
        with self._common_random_state():
            self._last_read = {"epoch": self.epoch, "random": self._random.get()}
            if owner is not None:
                self._last_read["source"] = copy.deepcopy(owner.state_dict())
            self._ahead = self._read_share(batches, None if self._indices is None else self._indices.iterator)
            if owner is not None and self._ahead is NOTHING:
                self._last_read["source_at_end"] = copy.deepcopy(owner.state_dict())
        return self._ahead

    def _read_share(self, batches: Iterator[Any], indices: IndexIterator | None) -> Any:
        """Return this process's part of the next batch, or NOTHING."""
        if indices is not None:
            loaded = next(batches, NOTHING)
            return NOTHING if loaded is NOTHING else replace(indices.issued.popleft(), content=loaded)
        group = self._read_group(batches)
        shard = self._sharding.share_loaded(group, self._first_group) if group else None
        return NOTHING if shard is None or shard.content is MISSING else shard

    def _read_group(self, batches: Iterator[Any]) -> list[Any]:
        """Read one batch per delivered batch of each process, from data without indices."""
        group = list(islice(batches, self._sharding.group_size))
        if isinstance(self._sharding, AccelerateSharding) and not self._first_group:
            self._first_group = group
        return group

    def _iterate(self) -> Iterator[Any]:
        """Return the batches of an epoch from its start."""
        return iter(self._source)

    def _position_owner(self) -> Any:
        """Return the loader or dataset that saves its own position, if the data has no indices; else None."""
        if self._indices is not None:
            return None
        if hasattr(self._source, "state_dict"):
            return self._source
        dataset = self._source.dataset
        return dataset if hasattr(dataset, "state_dict") and self._source.num_workers == 0 else None

    # ------------------------------------------------------------------ the start of an epoch

    def _begin_epoch(self) -> Iterator[Any]:
        if self._iteration is not None:
            self._end_iteration()
        self.end_of_epoch, self._ahead, self._first_group = False, UNREAD, []
        resume, self._resume = self._resume, None
        num_skipped, self._skip = self._skip, None
        if resume is not None:
            self._common = resume.get("common", self._common)
            # draw the random numbers from before the save again; this must not change the restored random state
            with self._random.kept():
                if "start" in resume:
                    num_batches = resume["num_delivered"] if num_skipped is None else num_skipped
                    if num_batches != resume["num_delivered"] and self.when_moved is not None:
                        self.when_moved()
                    return self._continue_epoch(resume, num_batches)
                self._return_to_boundary(resume)
        with self._order_of_rank_0():
            self._start = self._random.get() | {"has_workers": _has_workers(self._source)}
            set_epoch(self.loader, self.epoch)
            return self._skip_batches(num_skipped or 0)

    @contextmanager
    def _common_random_state(self) -> Iterator[None]:
        """Read one stream with the same random numbers on all processes, without changing their own."""
        if self._world.num_processes == 1 or self._indices is not None:
            yield
            return
        with preserve_host_random_state():
            assert self._common is not None
            restore_random_state(self._common)
            yield
            self._common = host_random_state()

    @contextmanager
    def _order_of_rank_0(self) -> Iterator[None]:
        """Draw rank 0's order on all processes, without changing their own random numbers.

        Accelerate sends only the state of the sampler's generator, and lets every process draw the rest itself.
        """
        if self._world.num_processes == 1:
            yield
            return
        if self._indices is not None and isinstance(self._sharding, AccelerateSharding):
            self._random.set_generator_states(self._world.broadcast_object(self._random.generator_states()))
            yield
            self._require_same_order(self._indices)
            return
        own = host_random_state()
        first = self._world.broadcast_object(self._random.get())
        if self._indices is None:
            self._common = self._common or first["host"]
            first = {**first, "host": self._common}
        self._random.set(first)
        yield
        if self._indices is not None and self._indices.iterator is not None:
            self._require_same_order(self._indices)
        else:
            self._common = host_random_state()
        if self._world.process_index > 0 or self._indices is None:
            restore_random_state(own)

    def _require_same_order(self, indices: IndexSource) -> None:
        assert indices.iterator is not None
        indices.iterator.prime()
        if isinstance(self._sharding, NoSharding) or self._is_compared:
            return  # a loader that was already divided has different rows on each process
        self._is_compared = True
        first = [list(batch)[:8] if hasattr(batch, "__iter__") else batch for batch in indices.iterator.group]
        require_same(
            self._world,
            "the order of their data",
            {"first rows": first},
            "seed the sampler equally on every process, or give it a generator or a set_epoch method",
        )

    def _continue_epoch(self, resume: dict[str, Any], num_batches: int) -> Iterator[Any]:
        """Return the rest of a saved epoch, after its first `num_batches` batches."""
        start, last_read = resume["start"], resume.get("last_read")
        is_same_position = num_batches == resume["num_delivered"]
        if last_read is not None and is_same_position:
            of_all = last_read.get("of_all", [last_read["random"]])
            last_read = {**last_read, "random": of_all[min(self._world.process_index, len(of_all) - 1)]}
            self._common = last_read["random"]["host"]
        self.epoch, self._start = resume["epoch"], start
        self.resumed_at = self.epoch, num_batches
        _restore_workers(self._source, self._indices, start["has_workers"])
        self._random.set(start)
        set_epoch(self.loader, self.epoch)
        if last_read is not None and "source" in last_read and is_same_position:
            self.num_delivered = num_batches
            return self._read_again(last_read)
        batches = self._skip_batches(num_batches)
        if self._indices is not None:
            assert self._indices.iterator is not None
            self._indices.iterator.prime()
            if not self._reads_ahead or last_read is None or not is_same_position:
                return batches
        if last_read is not None and is_same_position:
            self._random.set(last_read["random"])
        self._read_ahead(batches)
        return batches

    def _return_to_boundary(self, resume: dict[str, Any]) -> None:
        """Return data and workers to their state between two epochs, or before the first."""
        _restore_workers(self._source, self._indices, resume["has_workers"])
        if "last_read" in resume:
            next_epoch, self.epoch = self.epoch, resume["last_read"]["epoch"]
            set_epoch(self.loader, self.epoch)
            self._read_again(resume["last_read"])
            self.epoch, self._ahead = next_epoch, UNREAD

    def _read_again(self, last_read: dict[str, Any]) -> Iterator[Any]:
        """Repeat the last read of data that saves its own position; afterwards `_ahead` is that batch."""
        owner = self._position_owner()
        if "source_at_end" not in last_read:
            owner.load_state_dict(copy.deepcopy(last_read["source"]))
            batches = self._iterate()
            self._random.set(last_read["random"])
            self._read_ahead(batches)
            return batches
        # A state at the end of an epoch can mean two things: nothing is left, and one more iteration ends the epoch; or
        # the next epoch, which that iteration would start.
        owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        if next(self._iterate(), NOTHING) is not NOTHING:
            owner.load_state_dict(copy.deepcopy(last_read["source_at_end"]))
        self._last_read, self._ahead = last_read, NOTHING
        return iter(())

    def _skip_batches(self, num_batches: int) -> Iterator[Any]:
        """Return an epoch without its first `num_batches` batches; map-style rows are not loaded for them."""
        self.num_delivered = num_batches
        if self._indices is not None:
            self._indices.num_skipped = num_batches
            return self._iterate()
        batches = self._iterate()
        if num_batches:
            say(f"this dataset cannot save its position: {num_batches} batches are read again and skipped")
            for _ in range(num_batches):
                self._read_group(batches)
        return batches

    # ------------------------------------------------------------------ state

    def gather_state(self) -> None:
        """Gather what differs between the processes, before rank 0 saves: all of them call it."""
        if self._reads_ahead and self._indices is not None and self._last_read is not None:
            self._last_read["of_all"] = self._world.all_gather_object(self._last_read["random"])

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, and what is needed to resume from it."""
        generators = self._random.generator_states()
        if self._resume is not None:
            return {**self._resume, "epoch": self.epoch, "generators": generators}
        # an epoch is over once its last batch is delivered, even if the loop has not asked for the next one yet
        is_over = self._iteration is not None and self.end_of_epoch
        position = {
            "epoch": self.epoch + is_over,
            "num_delivered": 0 if is_over else self.num_delivered,
            "generators": generators,
            "has_workers": _has_workers(self._source),
            "group_size": self._sharding.group_size,
        }
        if self._common is not None:
            position["common"] = self._common
        has_begun = not is_over and self._start is not None and (self._indices is not None or self._ahead is not UNREAD)
        if has_begun:
            position["start"] = self._start
        if self._last_read is not None and (has_begun or "source" in self._last_read):
            position["last_read"] = self._last_read
        return position

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next iteration resume from a position that `state_dict` returned."""
        num_generators, num_saved = len(self._random.generators), len(state["generators"])
        if num_generators != num_saved:
            raise CheckpointError(
                f"the loader has {num_generators} generators, the saved one {num_saved}: it was a different loader, or "
                "shared by a different number of processes",
                "prepare the same objects in the same order; for a different number of processes, create the loader "
                "with DataLoader(…, generator=torch.Generator()), or with use_seedable_sampler=True, before saving",
            )
        if self._position_owner() is None and "source" in state.get("last_read", {}):
            raise ValueError("the saved dataset stored its own position; this one, or one with workers, does not")
        state = _with_group_size(state, self._sharding.group_size)
        self.epoch, self._resume, self._last_read = state["epoch"], state, state.get("last_read")
        self.num_delivered = state["num_delivered"]
        self._random.set_generator_states(state["generators"])

    def undo_point(self) -> Callable[[], None]:
        """Return a function that undoes `load_state_dict`; loading a state dict would restart the current epoch."""
        before = self.epoch, self._resume, self._last_read, self.num_delivered
        restore_generators = self._random.undo_point()

        def undo() -> None:
            self.epoch, self._resume, self._last_read, self.num_delivered = before
            restore_generators()

        return undo


def copy_loader(loader: DataLoader[Any], pins_memory: bool) -> DataLoader[Any]:
    """Return a shallow copy of a loader that delivers batches in order and, if wanted, pins memory."""
    source = copy.copy(loader)
    object.__setattr__(source, "_iterator", None)
    if pins_memory:
        source.pin_memory = True
    if loader.num_workers and not loader.in_order:
        # the order in which workers finish cannot be saved, and differs between processes
        log_info_once(
            "DataLoader(in_order=False) is ignored: batches come in the sampler's order, because a resumed run and the "
            "other processes must see each row once"
        )
        source.in_order = True
    return source


def _has_workers(source: DataLoader[Any]) -> bool:
    """Return whether persistent workers are running."""
    return bool(source.persistent_workers) and source._iterator is not None


def _restore_workers(source: DataLoader[Any], indices: IndexSource | None, had_workers: bool) -> None:
    """Start or stop persistent workers to match the saved run: starting them draws a random number."""
    if not source.persistent_workers or had_workers == _has_workers(source):
        return
    if not had_workers:
        source._iterator = None
        return
    if indices is not None:
        indices.holds_back = True
    iter(source)
    if indices is not None:
        indices.holds_back = False


def _with_group_size(state: dict[str, Any], group_size: int) -> dict[str, Any]:
    """Convert the number of delivered batches, if each process of the saved run took whole batches."""
    num_read = state["num_delivered"] * state.get("group_size", group_size)
    if num_read % group_size:
        raise CheckpointError(
            f"the state was saved after {num_read} batches of an epoch, which {group_size} processes with full "
            "batches each cannot reach",
            f"load it on a number of processes that divides {num_read}, or use Engine(split_batches=True)",
        )
    return {**state, "num_delivered": num_read // group_size, "group_size": group_size}
