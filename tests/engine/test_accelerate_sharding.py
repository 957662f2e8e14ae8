"""Batches are shared out as Accelerate does it: the same indices on every process, for every size."""

import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from trimtab.engine.accelerate_sharding import AccelerateSharding
from trimtab.engine.index_batches import IndexSource
from trimtab.errors import PrepareError


class OwnSizes:
    """A batch sampler that does not say a batch size: batches of 1, 2, 3, 1, 2, 3 …"""

    def __init__(self, num_batches):
        self._num_batches = num_batches

    def __iter__(self):
        rows = itertools.count()
        for batch in range(self._num_batches):
            yield [next(rows) for _ in range(batch % 3 + 1)]

    def __len__(self):
        return self._num_batches


def ours(batches, rank, num_processes, splits, is_even):
    sharding = AccelerateSharding(
        rank,
        num_processes,
        splits=splits,
        is_even=is_even,
        batch_size=getattr(batches, "batch_size", None),
        drop_last=getattr(batches, "drop_last", False),
    )
    source = IndexSource(batches, sharding)
    return list(source), len(source), [shard.num_rows for shard in source.iterator.issued]


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("drop_last", [True, False])
def test_indices_are_those_of_accelerate(drop_last, splits, is_even):
    theirs = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    for num_processes, batch_size, num_rows in itertools.product((2, 3), (1, 2, 6), range(30)):
        if splits and batch_size % num_processes:
            continue
        batches = BatchSampler(SequentialSampler(range(num_rows)), batch_size, drop_last)
        real = 0
        for rank in range(num_processes):
            expected = theirs(batches, num_processes, rank, splits, is_even)
            found, length, num_real = ours(batches, rank, num_processes, splits, is_even)
            assert found == list(expected), (num_processes, batch_size, num_rows, rank)
            assert length == len(expected)
            real += sum(num_real)
        dropped = num_rows % (batch_size if splits else batch_size * num_processes) if drop_last else 0
        assert real == num_rows - dropped, "every row counts once in metrics"


@pytest.mark.parametrize("is_even", [True, False])
def test_batches_of_different_sizes_stay_whole(is_even):
    theirs = pytest.importorskip("accelerate.data_loader").BatchSamplerShard
    for num_processes, num_batches in itertools.product((2, 3), range(1, 9)):
        for rank in range(num_processes):
            expected = list(theirs(OwnSizes(num_batches), num_processes, rank, False, is_even))
            assert ours(OwnSizes(num_batches), rank, num_processes, False, is_even)[0] == expected


def test_a_batch_that_cannot_be_divided_evenly_is_refused():
    with pytest.raises(PrepareError, match="batch_size=5 cannot be divided into 2 equal parts") as caught:
        AccelerateSharding(0, 2, splits=True, is_even=True, batch_size=5, drop_last=False)
    assert "a multiple of 2" in caught.value.cure


def loaded(rank, group, first, *, dispatches, batch_size=2):
    sharding = AccelerateSharding(
        rank, 2, splits=False, is_even=True, batch_size=batch_size, drop_last=False, dispatches=dispatches
    )
    shard = sharding.share_loaded(group, first)
    return shard.content, shard.rows_of_all


@pytest.mark.parametrize(
    ("dispatches", "parts"), [(True, [[[8, 9], [10, 0]], (2, 1)]), (False, [[[8, 9], [10, 0]], (2, 1)])]
)
def test_a_short_last_batch_that_was_loaded_is_filled_up(dispatches, parts):
    first, last = [torch.tensor([0, 1]), torch.tensor([2, 3])], [torch.tensor([8, 9]), torch.tensor([10])]
    for rank in range(2):
        content, rows_of_all = loaded(rank, last, first, dispatches=dispatches)
        assert content.tolist() == parts[0][rank]
        assert rows_of_all == parts[1]


def test_a_group_without_a_second_batch_is_divided_anew_or_filled_up():
    first, last = [torch.tensor([0, 1]), torch.tensor([2, 3])], [torch.tensor([8, 9])]
    assert [loaded(rank, last, first, dispatches=True)[0].tolist() for rank in range(2)] == [[8], [9]]
    assert [loaded(rank, last, first, dispatches=False)[0].tolist() for rank in range(2)] == [[8, 9], [0, 1]]


def test_ragged_batches_stay_whole_and_an_end_that_cannot_be_joined_is_refused():
    first = [torch.zeros(2, 3), torch.zeros(2, 4)]
    assert loaded(1, first, first, dispatches=True)[0].shape == (2, 4)
    with pytest.raises(PrepareError, match="cannot be joined.*\n  cure: pad all rows to one length"):
        loaded(1, [torch.zeros(2, 3), torch.zeros(1, 4)], first, dispatches=True)
