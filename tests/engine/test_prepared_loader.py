"""A prepared loader gives the batches of the plain one, knows its last, and moves what it can without copies."""

import collections
import dataclasses
import re
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler, TensorDataset

from trimtab import Engine
from trimtab.engine.placement import to_device

META = torch.device("meta")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")  # two workers on a machine of one core


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(range(7))


def loaders():
    rows = TensorDataset(torch.arange(7))
    return {
        "plain": lambda: DataLoader(rows, batch_size=2),
        "shuffled": lambda: DataLoader(rows, batch_size=2, shuffle=True),
        "dropping the last": lambda: DataLoader(rows, batch_size=2, shuffle=True, drop_last=True),
        "with a generator": lambda: DataLoader(rows, 3, shuffle=True, generator=torch.Generator().manual_seed(4)),
        "with replacement": lambda: DataLoader(rows, 2, sampler=RandomSampler(rows, replacement=True, num_samples=9)),
        "batch sampler": lambda: DataLoader(rows, batch_sampler=BatchSampler(SequentialSampler(rows), 3, False)),
        "no batching": lambda: DataLoader(rows, batch_size=None, shuffle=True),
        "workers": lambda: DataLoader(rows, batch_size=2, shuffle=True, num_workers=2),
        "iterable": lambda: DataLoader(Numbers(), batch_size=2),
        "iterable without batching": lambda: DataLoader(Numbers(), batch_size=None),
        "empty": lambda: DataLoader(TensorDataset(torch.ones(0)), batch_size=2),
    }


def values(batch: Any) -> Any:
    return (
        batch.tolist()
        if isinstance(batch, torch.Tensor)
        else [values(b) for b in batch]
        if isinstance(batch, list | tuple)
        else batch
    )


@pytest.mark.parametrize("name", loaders())
def test_batches_and_random_numbers_are_those_of_the_plain_loader(name):
    """Dropout between batches draws from the same generator as the shuffle: both must be as they were."""
    seen = []
    for prepare in (False, True):
        torch.manual_seed(1)
        loader = loaders()[name]()
        if prepare:
            loader = Engine(device="cpu").prepare(loader)
        seen.append([(values(batch), torch.rand(1).item()) for _ in range(2) for batch in loader])
    assert seen[0] == seen[1]
    assert len(seen[0]) > 0 or name == "empty"


@pytest.mark.parametrize("name", [name for name in loaders() if name != "empty"])
def test_the_last_batch_is_known_when_it_arrives(name):
    loader = Engine(device="cpu").prepare(loaders()[name]())
    for _ in range(2):
        ends = [loader.end_of_epoch for _ in loader]
        assert ends == [False] * (len(ends) - 1) + [True]


@pytest.mark.parametrize("name", ["shuffled", "iterable"])
def test_nothing_is_drawn_or_skipped_before_the_first_batch(name):
    """tqdm.auto calls `iter` when it is created, and again in the loop."""
    torch.manual_seed(1)
    expected = [values(batch) for batch in loaders()[name]()]
    torch.manual_seed(1)
    loader = Engine(device="cpu").prepare(loaders()[name]())
    loader.start_at(1)
    before = torch.get_rng_state()
    unused = iter(loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert [values(batch) for batch in loader] == expected[1:]
    unused.close()
    assert loader.epoch == 1


@pytest.mark.parametrize("name", ["plain", "no batching", "workers", "iterable"])
def test_iterations_that_are_open_at_once_are_independent(name):
    engine = Engine(device="cpu")
    loader = engine.prepare(loaders()[name]())
    first, second = zip(*((values(a), values(b)) for a, b in zip(loader, loader, strict=True)), strict=True)
    assert sorted(re.findall(r"\d", str(first))) == sorted(re.findall(r"\d", str(second))) == list("0123456")
    abandoned = iter(loader)
    next(abandoned)
    assert len(list(loader)) == len(first)
    assert len(list(abandoned)) == len(first) - 1
    assert engine.gradient_state.active_dataloader is None


def test_remaining_batches_are_counted():
    loader = Engine(device="cpu").prepare(loaders()["plain"]())
    assert [loader.num_remaining for _ in loader] == [3, 2, 1, 0]


@pytest.mark.parametrize("name", ["shuffled", "iterable"])
def test_a_loaded_position_is_shown_before_the_first_batch(name):
    engine = Engine(device="cpu")
    loader, other = engine.prepare(loaders()[name](), loaders()[name]())
    for _, _ in zip(range(2), loader, strict=False):
        state = loader.state_dict()
    assert state["num_delivered"] == 2
    undo = other.undo_point()
    for _ in other:
        other.load_state_dict(state)
        break
    assert other.num_delivered == 2, "also if another iteration was open then"
    assert len(list(other)) == 2
    undo()
    assert other.num_delivered == 0


def test_the_plain_loader_is_left_alone():
    plain = loaders()["shuffled"]()
    before = dict(plain.__dict__)
    list(Engine(device="cpu").prepare(plain))
    assert plain.__dict__ == before


def test_samplers_are_told_the_epoch():
    class Listening(SequentialSampler):
        epochs: list[int] = []  # noqa: RUF012

        def set_epoch(self, epoch):
            self.epochs.append(epoch)

    rows = TensorDataset(torch.arange(3))
    loader = Engine(device="cpu").prepare(DataLoader(rows, sampler=Listening(rows)))
    list(loader)
    for _ in loader:
        break
    list(loader)
    assert Listening.epochs == [0, 1, 2]


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    x: torch.Tensor
    name: str


class HasTo:
    def __init__(self, device="cpu"):
        self.device = device

    def to(self, device):
        return HasTo(str(device))


def test_nested_batches_move_and_keep_their_types():
    x = torch.ones(2)
    batch = {
        "tensor": x,
        "list": [x, (x, 3)],
        "pair": Pair(x, "text"),
        "record": Record(x, "name"),
        "ordered": collections.OrderedDict(k=x),
        "user": collections.UserDict(k=x),
        "own": HasTo(),
        "none": None,
    }
    moved = to_device(batch, META)
    assert moved["tensor"].device == META
    assert moved["list"][1][0].device == META
    assert moved["list"][1][1] == 3
    assert type(moved["pair"]) is Pair
    assert moved["pair"].a.device == META
    assert moved["pair"].b == "text"
    assert type(moved["record"]) is Record
    assert moved["record"].x.device == META
    assert type(moved["ordered"]) is collections.OrderedDict
    assert moved["ordered"]["k"].device == META
    assert type(moved["user"]) is collections.UserDict
    assert moved["user"]["k"].device == META
    assert moved["own"].device == "meta"
    assert moved["none"] is None
    assert batch["tensor"].device.type == "cpu"


def test_what_is_there_already_is_not_copied():
    x = torch.ones(2)
    assert to_device({"a": x}, torch.device("cpu"))["a"] is x
    loader = Engine(device="cpu").prepare(DataLoader([{"a": x}], batch_size=None))
    assert next(iter(loader))["a"].data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 10),
        ({"drop_last": True}, 8),
        ({"sampler": range(8)}, 8),
        ({"sampler": range(9)}, 9),
        ({"dataset": Numbers()}, 7),
    ],
)
def test_values_repeated_for_a_batch_are_cut_to_the_rows_it_had(settings, expected):
    engine = Engine(device="cpu")
    loader = engine.prepare(DataLoader(**{"dataset": TensorDataset(torch.arange(10)), "batch_size": 4, **settings}))
    assert sum(len(engine.gather_for_metrics(torch.zeros(()).repeat(4))) for _ in loader) == expected
