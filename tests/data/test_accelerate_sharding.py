"""Batches are shared out as Accelerate does it: the same indices on every process, for every size."""

import itertools

import pytest
from torch.utils.data import BatchSampler, SequentialSampler

from trimtab.data.accelerate_sharding import AccelerateSharding
from trimtab.data.index_batches import IndexSource
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
