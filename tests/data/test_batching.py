"""Batches are a pure function of seed and epoch, hold every row once, and pad little."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from trimtab import Engine
from trimtab.data.batching import LengthGroupedBatches, epoch_batches, padding_share, split_batch

lengths_strategy = st.lists(st.integers(0, 50), max_size=60)
options_strategy = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 9),
        "seed": st.integers(0, 3),
        "epoch": st.integers(0, 3),
        "group_by_length": st.booleans(),
        "sort_window": st.integers(1, 4),
        "shuffle": st.booleans(),
    }
)
LENGTHS = random.Random(0).choices(range(1, 201), k=1003)


@settings(max_examples=50)
@given(lengths_strategy, options_strategy)
def test_every_row_exactly_once(lengths, options):
    batches = epoch_batches(lengths, **options)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    size = options["batch_size"]
    num_full, num_left = divmod(len(lengths), size)
    assert sorted(map(len, batches)) == [num_left] * (num_left > 0) + [size] * num_full
    assert batches == epoch_batches(lengths, **options)
    assert batches == epoch_batches(torch.tensor(lengths, dtype=torch.int64), **options)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), options_strategy)
def test_a_batch_is_a_run_of_its_sorted_window(lengths, options):
    """Within a window the batches do not overlap in length, so no cut of it could pad less."""
    options |= {"group_by_length": True, "shuffle": True}
    batches = epoch_batches(lengths, **options)
    for batch in batches:
        sizes = [lengths[row] for row in batch]
        assert sizes == sorted(sizes)
    if options["sort_window"] * options["batch_size"] >= len(lengths):
        spans = sorted((min(lengths[r] for r in batch), max(lengths[r] for r in batch)) for batch in batches)
        assert all(before[1] <= after[0] for before, after in zip(spans, spans[1:], strict=False))


def test_seed_and_epoch_each_change_the_order():
    orders = {
        (seed, epoch): str(epoch_batches(LENGTHS, 8, seed=seed, epoch=epoch)) for seed in range(5) for epoch in range(5)
    }
    assert len(set(orders.values())) == 25


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    list(LengthGroupedBatches(LENGTHS, 8, 4, seed=0))
    assert torch.equal(before, torch.get_rng_state())


def test_grouping_pads_little_and_stays_random():
    batches = epoch_batches(LENGTHS, 8, seed=0, epoch=0)
    assert padding_share(LENGTHS, batches) < 0.05
    assert padding_share(LENGTHS, epoch_batches(LENGTHS, 8, seed=0, epoch=0, group_by_length=False)) > 0.3
    longest = [max(LENGTHS[row] for row in batch) for batch in batches]
    num_rises = sum(before < after for before, after in zip(longest, longest[1:], strict=False))
    assert 0.3 < num_rises / len(longest) < 0.7


def test_no_length_is_always_in_the_short_batch():
    """The short batch makes a larger step for each of its rows; it must not always hold the longest or the shortest."""
    shorts = [
        next(batch for batch in epoch_batches(LENGTHS, 8, seed=0, epoch=epoch) if len(batch) == 3)
        for epoch in range(60)
    ]
    means = [sum(LENGTHS[row] for row in batch) / 3 for batch in shorts]
    assert min(means) < 60
    assert max(means) > 140
    positions = {
        [len(batch) for batch in epoch_batches(LENGTHS, 8, seed=0, epoch=epoch)].index(3) for epoch in range(10)
    }
    assert len(positions) > 5


def test_without_a_shuffle():
    assert epoch_batches([3, 1, 2], 2, seed=0, epoch=0, group_by_length=False, shuffle=False) == [[0, 1], [2]]
    assert epoch_batches([3, 1, 3, 9], 2, seed=5, epoch=1, shuffle=False) == [[3, 0], [2, 1]]  # the longest first


def test_sizes_below_one_are_refused():
    for wrong in ({"batch_size": 0}, {"batch_size": 2, "sort_window": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            epoch_batches([1, 2], seed=0, epoch=0, **wrong)
    with pytest.raises(ValueError, match="at least 1"):
        LengthGroupedBatches([1, 2], 2, 0, seed=0)


@settings(max_examples=50)
@given(
    lengths_strategy, st.integers(1, 9), st.integers(1, 9), st.booleans(), st.booleans(), st.none() | st.integers(0, 5)
)
def test_micro_batches_are_the_batches_cut(lengths, batch_size, micro, group, shuffle, limit):
    sampler = LengthGroupedBatches(
        lengths, batch_size, micro, seed=1, group_by_length=group, shuffle=shuffle, limit_batches=limit
    )
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        batches = epoch_batches(lengths, batch_size, seed=1, epoch=epoch, group_by_length=group, shuffle=shuffle)[
            :limit
        ]
        found = list(sampler)
        assert len(found) == len(sampler)
        assert sampler.window_sizes() == [-(-len(batch) // micro) for batch in batches]
        assert all(0 < len(rows) <= micro for rows in found)
        assert [row for rows in found for row in rows] == [row for batch in batches for row in batch]
        assert list(sampler) == found


def test_it_drives_a_prepared_loader():
    """The loader tells the epoch, counts what remains, and goes on in the middle of an epoch."""
    sampler = LengthGroupedBatches(LENGTHS[:21], 8, 3, seed=0)
    loader = Engine(device="cpu").prepare(DataLoader(list(range(21)), batch_sampler=sampler))
    assert len(loader) == 3 + 3 + 2
    seen = [[batch.tolist() for batch in loader] for _ in range(2)]
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        assert seen[epoch] == list(sampler)
    assert seen[0] != seen[1]
    loader.set_epoch(1)
    loader.start_at(5)
    assert [batch.tolist() for batch in loader] == seen[1][5:]


def test_padding_share():
    assert padding_share([4, 2, 3], [[0, 1], [2]]) == pytest.approx(1 - 9 / 11)
    assert padding_share([4, 4], [[0, 1]]) == 0
    assert padding_share([], []) == 0
    assert padding_share([0, 0], [[0, 1], []]) == 0


@settings(max_examples=50)
@given(lengths_strategy, st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.booleans())
def test_micro_batches_cut_anew(lengths, batch_size, before, after, was_drawn):
    """The batches stay; also where they were drawn already."""
    sampler = LengthGroupedBatches(lengths, batch_size, before, seed=1)
    if was_drawn:
        sampler.windows()
    sampler.set_micro_batch_size(after)
    other = LengthGroupedBatches(lengths, batch_size, after, seed=1)
    assert sampler.windows() == other.windows()
    assert sampler.window_sizes() == other.window_sizes()
    assert len(sampler) == len(other)
    with pytest.raises(ValueError, match="at least 1"):
        sampler.set_micro_batch_size(0)


@pytest.mark.parametrize("micro", [1, 3, 8, 20])
@pytest.mark.parametrize("group", [True, False])
def test_no_micro_batch_is_larger_than_the_worst(micro, group):
    """In any epoch; and one is as large in most, unless the longest rows come last, in what is left of a batch."""
    sampler = LengthGroupedBatches(LENGTHS[:99], 8, micro, seed=3, group_by_length=group)
    num_rows, longest = min(micro, 8), max(LENGTHS[:99])
    worst = sampler.largest_micro_batch()
    assert len(set(worst)) == len(worst) == num_rows
    assert max(LENGTHS[row] for row in worst) == longest
    reached = 0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        shapes = [(len(rows), max(LENGTHS[row] for row in rows)) for rows in sampler]
        assert all(rows <= num_rows and length <= longest for rows, length in shapes)
        reached += (num_rows, longest) in shapes
    assert reached >= 3 or micro == 3


def test_the_worst_of_few_batches_is_one_of_them():
    sampler = LengthGroupedBatches(LENGTHS, 8, 4, seed=0, limit_batches=3)
    assert sampler.largest_micro_batch() in list(sampler)
    size = {tuple(rows): len(rows) * max(LENGTHS[row] for row in rows) for rows in sampler}
    assert size[tuple(sampler.largest_micro_batch())] == max(size.values())


def test_the_worst_where_labels_are_padded_too():
    """One row with the longest input and one with the longest labels: no batch is padded further in either."""
    sampler = LengthGroupedBatches([9, 8, 1, 2], 4, 2, seed=0)
    assert sampler.largest_micro_batch([1, 2, 3, 7]) == [0, 3]
    sampler.set_micro_batch_size(1)
    assert sampler.largest_micro_batch([1, 4, 3, 7]) == [1]


def test_a_batch_in_pieces():
    batch = {"input_ids": torch.arange(15).view(5, 3), "labels": torch.arange(5)}
    pieces = split_batch(batch, 2)
    assert [len(piece["labels"]) for piece in pieces] == [2, 2, 1]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])
    assert pieces[0]["labels"].data_ptr() == batch["labels"].data_ptr()
    assert split_batch(batch, 5)[0] is batch
    uneven = {"input_ids": torch.ones(4, 2), "bounds": torch.ones(5)}
    assert split_batch(uneven, 2) == [uneven]
