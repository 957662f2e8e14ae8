"""Packed batches hold the tokens of their rows and nothing else; micro-batches are filled up to a number of tokens."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data.batching import Batching, LengthGroupedBatches, split_batch
from trimtab.data.packing import (
    MAX_LENGTH,
    MAX_ROW_LENGTH,
    ROW_LENGTH,
    ROW_STARTS,
    PackedCollate,
    RoundedCollate,
    choose_sizes,
    count_filled_rows,
    count_rows,
    count_tokens,
    pack_batch,
    rounded_up,
    share_by_tokens,
    split_by_tokens,
)
from trimtab.data.tasks.padding import IGNORED
from trimtab.engine.sharding import SplitRows

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)
PAD = 99


def padded(lengths, labels_of_tokens=True):
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.arange(mask.numel()).view(mask.shape)
    labels = ids.masked_fill(mask == 0, IGNORED) if labels_of_tokens else torch.arange(len(lengths))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


# ---------------------------------------------------------------------- micro-batches by tokens


@given(LENGTHS, st.integers(1, 200), st.none() | st.integers(1, 5))
def test_every_row_is_in_one_micro_batch_within_the_limits(lengths, max_tokens, max_rows):
    rows, sizes = list(range(len(lengths)))[::-1], torch.tensor(lengths)
    found = split_by_tokens(rows, sizes, max_tokens, max_rows)
    assert sorted(row for micro in found for row in micro) == sorted(rows)
    for micro in found:
        assert len(micro) <= (max_rows or len(rows))
        assert len(micro) == 1 or sum(lengths[row] for row in micro) <= max_tokens
        assert micro == sorted(micro, key=rows.index), "rows keep their order"


def test_best_fit_fills_micro_batches():
    lengths = torch.tensor([6, 5, 4, 3, 2])
    assert split_by_tokens(range(5), lengths, 10) == [[0, 2], [1, 3, 4]]


@given(LENGTHS, st.integers(1, 12), st.integers(1, 12))
def test_batches_are_the_same_whatever_divides_them(lengths, batch_size, micro_batch):
    by_rows, by_tokens = (
        LengthGroupedBatches(lengths, batch_size, min(micro_batch, batch_size), seed=3, tokens_per_row=per_row)
        for per_row in (None, max(lengths))
    )
    for rows, tokens in zip(by_rows.windows(), by_tokens.windows(), strict=True):
        assert sorted(sum(rows, [])) == sorted(sum(tokens, []))
        assert all(sum(lengths[row] for row in micro) <= by_tokens.max_tokens for micro in tokens)
        assert len(tokens) <= len(rows), "as many rows fit, and shorter ones leave room"
    worst = sum(lengths[row] for row in by_tokens.largest_micro_batch())
    assert worst <= by_tokens.max_tokens <= max(max(lengths), by_tokens.micro_batch_size * max(lengths))


@given(LENGTHS, st.integers(1, 200), st.integers(2, 4), st.none() | st.integers(1, 5))
def test_processes_have_as_many_micro_batches_each_within_the_limits(lengths, max_tokens, num_processes, max_rows):
    rows, sizes = list(range(len(lengths))), torch.tensor(lengths)
    found = share_by_tokens(rows, sizes, max_tokens, num_processes, max_rows)
    assert sorted(row for micro in found for row in micro) == rows
    assert len(found) == -(-len(split_by_tokens(rows, sizes, max_tokens, max_rows)) // num_processes)
    for micro in found:
        assert len(micro.rows_of_all) == num_processes
        left = list(micro)
        for num_rows in micro.rows_of_all:
            share, left = left[:num_rows], left[num_rows:]
            assert num_rows <= (max_rows or len(rows))
            assert num_rows <= 1 or sum(lengths[row] for row in share) <= max_tokens
        assert not left


def test_processes_get_even_shares():
    lengths = torch.tensor([50, 40, 30, 20, 10, 10])
    (micro,) = share_by_tokens(range(6), lengths, 100, 2)
    shares = [list(micro)[: micro.rows_of_all[0]], list(micro)[micro.rows_of_all[0] :]]
    assert [int(lengths[share].sum()) for share in shares] == [80, 80]


@pytest.mark.parametrize("tokens_per_row", [None, 60])
@pytest.mark.parametrize("num_processes", [1, 3])
def test_the_largest_of_few_batches_has_most_tokens(tokens_per_row, num_processes):
    """Of one process; by rows, one long row with short ones is less than rows of middle length."""
    lengths = [60, 1, 1, 1, 1, 1, 40, 40, 40, 40, 40, 40] * 9
    batches = LengthGroupedBatches(
        lengths,
        24,
        6,
        seed=0,
        group_by_length=False,
        shuffle=False,
        limit_batches=2,
        tokens_per_row=tokens_per_row,
        num_processes=num_processes,
        batching=Batching(is_packed=True),
    )

    def num_tokens(rows):
        return sum(lengths[row] for row in batches.largest_share(rows))

    assert num_tokens(batches.largest_micro_batch()) == max(num_tokens(rows) for rows in batches)


def test_smaller_micro_batches_are_those_of_a_new_sampler():
    """A run that was resumed after memory ran out divides its batches in the same way."""
    lengths = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6] * 4

    def sampler(micro_batch):
        return LengthGroupedBatches(lengths, 8, micro_batch, seed=0, tokens_per_row=9)

    shrunk = sampler(8)
    shrunk.windows()
    shrunk.set_micro_batch_size(2)
    assert shrunk.windows() == sampler(2).windows()
    assert len(shrunk) == sum(shrunk.window_sizes()) == len(list(shrunk))


def test_limits_of_tokens_and_of_rows_both_hold():
    """Short rows fill up a micro-batch although only three of the longest would fit."""
    made = {"tokens_per_row": 1000 / 3, "max_rows": 8}
    (window,) = LengthGroupedBatches([100] * 16, 16, 3, seed=0, **made).windows()
    assert [len(micro) for micro in window] == [8, 8]
    (window,) = LengthGroupedBatches([300, *[10] * 15], 16, 3, seed=0, **made).windows()
    assert sorted(len(micro) for micro in window) == [8, 8]
    sampler = LengthGroupedBatches([100] * 16, 16, 2, seed=0, tokens_per_row=2048, max_rows=2)
    assert sampler.max_tokens == 200, "two rows have no more"
    sampler.set_micro_batch_size(1)
    assert sampler.max_tokens == 100
    assert all(len(micro) == 1 for micro in sampler)


@pytest.mark.parametrize("micro_batch", range(1, 100))
def test_the_limit_of_tokens_is_not_rounded_down(micro_batch):
    sampler = LengthGroupedBatches([1] * 200, 200, micro_batch, seed=0, tokens_per_row=100 / micro_batch)
    assert sampler.max_tokens == 100


# ---------------------------------------------------------------------- few sizes


@given(st.lists(st.integers(50, 5000), min_size=1, max_size=200))
def test_sizes_are_few_and_hold_every_micro_batch(totals):
    sizes = choose_sizes(totals, max_filler=0.03, max_sizes=32)
    assert len(sizes) <= 32
    assert sizes[-1] == max(totals)
    assert sizes == tuple(sorted(set(sizes)))
    rounded = [rounded_up(total, sizes) for total in totals]
    assert all(size >= total for size, total in zip(rounded, totals, strict=True))
    assert set(rounded) <= set(sizes)


def test_filler_is_little():
    lengths = torch.randint(30, 512, (3200,), generator=torch.Generator().manual_seed(0))
    totals = lengths.view(-1, 32).sum(1).tolist()
    sizes = choose_sizes(totals)
    filler = sum(rounded_up(total, sizes) - total for total in totals)
    assert filler <= 0.03 * sum(totals)
    assert len(sizes) <= 12


def test_chosen_sizes_have_the_least_filler():
    totals = [16, 17, 24, 40, 41, 43, 64, 66, 95, 96]
    multiples = sorted({min(96, -(-total // 8) * 8) for total in totals})

    def filler(sizes):
        return sum(rounded_up(total, sizes) - total for total in totals)

    for max_sizes in (1, 2, 3, 4):
        found = choose_sizes(totals, max_filler=0.0, max_sizes=max_sizes)
        others = itertools.combinations(multiples[:-1], max_sizes - 1)
        assert filler(found) == min(filler((*sizes, 96)) for sizes in others)


def test_a_size_that_is_not_in_the_list():
    assert rounded_up(100, ()) == 100
    assert rounded_up(100, (64, 80)) == 100
    assert choose_sizes([]) == ()


# ---------------------------------------------------------------------- packed batches


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_tokens_are_those_of_the_rows(lengths, num_filler):
    batch, total = padded(lengths), sum(lengths)
    packed = pack_batch(batch, total + num_filler, PAD, shifts_labels=False)
    is_token = batch["attention_mask"].bool()
    assert set(packed) == {"input_ids", "labels", "position_ids", ROW_STARTS, MAX_LENGTH, MAX_ROW_LENGTH}
    assert packed["input_ids"].tolist() == [batch["input_ids"][is_token].tolist() + [PAD] * num_filler]
    assert packed["labels"].tolist() == [batch["labels"][is_token].tolist() + [IGNORED] * num_filler]
    assert packed["position_ids"].tolist() == [[at for n in lengths for at in range(n)] + [0] * num_filler]
    starts = packed[ROW_STARTS]
    assert starts.dtype is torch.int32
    assert starts.diff().tolist() == [*lengths, num_filler]
    assert packed[MAX_LENGTH] == max(*lengths, num_filler)
    assert packed[MAX_ROW_LENGTH] == max(lengths)
    assert count_rows(packed) == count_rows(batch) == len(lengths)
    assert int(count_tokens(packed)) == int(count_tokens(batch)) == total


def test_no_row_is_predicted_from_the_row_before():
    packed = pack_batch(padded([3, 1, 2]), 6, PAD, shifts_labels=True)
    labels = packed["labels"][0]
    starts = packed[ROW_STARTS][:3].long()
    assert (labels[starts] == IGNORED).all()
    assert (labels != IGNORED).sum() == 3


def test_labels_of_rows_stay():
    packed = pack_batch(padded([3, 1], labels_of_tokens=False), 4, PAD, shifts_labels=False)
    assert packed["labels"].tolist() == [0, 1]


def with_several_labels(lengths):
    """Rows have as many labels, or targets, as the longest one has tokens."""
    batch = padded(lengths)
    return batch | {"labels": torch.arange(batch["input_ids"].numel()).view(len(lengths), -1).float()}


@pytest.mark.parametrize("lengths", [[3, 1], [4]])
def test_several_labels_of_rows_stay(lengths):
    labels = with_several_labels(lengths)["labels"]
    packed = PackedCollate(with_several_labels, False, PAD, lambda: (8,), max_length=9, num_starts=8)(lengths)
    assert torch.equal(packed["labels"], labels)
    assert count_rows(packed) == len(lengths)
    whole = PackedCollate(with_several_labels, False, PAD, num_starts=8)(lengths)
    assert torch.equal(whole["labels"], labels)
    assert count_rows(whole) == len(lengths)
    rounded = RoundedCollate(with_several_labels, PAD, lambda: (8,))(lengths)
    assert rounded["input_ids"].shape == (len(lengths), 8)
    assert torch.equal(rounded["labels"], labels)


@pytest.mark.parametrize("labels_of_tokens", [True, False])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 9])
def test_pieces_of_a_packed_batch(labels_of_tokens, num_rows):
    lengths = [4, 2, 7, 1, 3]
    whole = pack_batch(padded(lengths, labels_of_tokens), sum(lengths) + 3, PAD, shifts_labels=False)
    pieces = split_batch(whole, num_rows)
    assert [count_rows(piece) for piece in pieces] == [min(num_rows, 5 - first) for first in range(0, 5, num_rows)]
    assert sum(int(count_tokens(piece)) for piece in pieces) == sum(lengths)
    total = sum(lengths)
    for name in ("input_ids", "position_ids"):
        assert torch.cat([piece[name][:, : int(count_tokens(piece))] for piece in pieces], 1).tolist() == (
            whole[name][:, :total].tolist()
        )
    dim = 1 if labels_of_tokens else 0
    labels = torch.cat([piece["labels"] for piece in pieces], dim)
    assert labels.flatten().tolist()[: whole["labels"].numel()][:total] == whole["labels"].flatten().tolist()[:total]


def test_the_collator_rounds_up():
    collate = PackedCollate(padded, False, PAD, lambda: (8, 16))
    assert collate([3, 4])["input_ids"].shape == (1, 8)
    assert collate([9, 4])["input_ids"].shape == (1, 16)
    assert collate([9, 9])["input_ids"].shape == (1, 18), "larger than all sizes"
    assert collate([3, 4], num_tokens=12)["input_ids"].shape == (1, 12)


@pytest.mark.parametrize("labels_of_tokens", [True, False])
def test_inputs_of_compiled_code_repeat(labels_of_tokens):
    """The bound of lengths and, where no head has an output per row, the number of rows are the same in all batches."""
    collate = PackedCollate(
        lambda lengths: padded(lengths, labels_of_tokens), False, PAD, lambda: (16,), max_length=9, num_starts=8
    )
    for lengths in ([3, 4], [9], [1, 2, 3, 4, 5, 1]):
        batch = collate(lengths)
        assert batch[MAX_LENGTH] == max(9, 16 - sum(lengths))
        assert batch[MAX_ROW_LENGTH] == 9
        assert int(count_tokens(batch)) == sum(lengths)
        assert int(count_filled_rows(batch)) == len(lengths)
        found = batch[ROW_STARTS].diff().tolist()
        if labels_of_tokens:
            assert found == [*lengths, *[0] * (6 - len(lengths)), 16 - sum(lengths)]
        else:
            assert found == [*lengths, 16 - sum(lengths)]


@pytest.mark.parametrize("tokens_per_row", [None, 60])
def test_sizes_are_those_of_the_shares_of_processes(tokens_per_row):
    """Sizes and the largest share are of what the processes get, also where rows cannot be divided evenly."""
    lengths = torch.randint(5, 60, (70,), generator=torch.Generator().manual_seed(0))
    batches = LengthGroupedBatches(
        lengths,
        14,
        7,
        seed=0,
        tokens_per_row=tokens_per_row,
        num_processes=3,
        batching=Batching(is_packed=True, has_few_sizes=True),
    )
    for rows in batches:
        shares = [SplitRows(rank, 3).share_indices([rows], [rows]) for rank in range(3)]
        totals = [int(lengths[share.content].sum()) for share in shares if share.num_rows]
        assert int(lengths[batches.largest_share(rows)].sum()) == max(totals)
        assert {rounded_up(total, batches.sizes) for total in totals} <= set(batches.sizes)


def test_padded_rows_are_rounded_up_too():
    collate = RoundedCollate(padded, PAD, lambda: (8, 16))
    batch = collate([3, 5])
    assert batch["input_ids"].shape == batch["labels"].shape == (2, 8)
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert (batch["input_ids"][:, 5:] == PAD).all()
    assert (batch["labels"][:, 5:] == IGNORED).all()
    assert collate([8, 1])["input_ids"].shape == (2, 8)


@pytest.mark.parametrize("is_packed", [True, False])
def test_no_epoch_has_a_micro_batch_beyond_the_largest_size(is_packed):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 200, (300,), generator=draw).tolist()
    batches = LengthGroupedBatches(lengths, 16, 4, seed=0, batching=Batching(is_packed=is_packed, has_few_sizes=True))
    for epoch in range(4):
        batches.set_epoch(epoch)
        assert all(batches.shape_of(rows)[1] <= max(batches.sizes) for rows in batches)


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize("tokens_per_row", [None, 60])
@pytest.mark.parametrize("is_packed", [True, False])
def test_a_run_has_few_sizes(is_packed, tokens_per_row, num_processes):
    lengths = torch.randint(5, 60, (600,), generator=torch.Generator().manual_seed(0)).tolist()
    made = {
        "tokens_per_row": tokens_per_row if is_packed else None,
        "num_processes": num_processes,
        "batching": Batching(is_packed=is_packed, has_few_sizes=True),
    }
    batches = LengthGroupedBatches(lengths, 24, 12, seed=0, **made)
    shapes = {batches.shape_of(rows) for rows in batches}
    assert {extent for _, extent in shapes} <= set(batches.sizes)
    assert len(batches.sizes) < 40
    sizes = batches.sizes
    batches.set_epoch(1)
    assert batches.sizes == sizes
    later = LengthGroupedBatches(lengths, 24, 12, seed=0, **made)
    later.set_epoch(1)
    assert later.sizes == sizes
    batches.set_micro_batch_size(6)
    assert batches.sizes == LengthGroupedBatches(lengths, 24, 6, seed=0, **made).sizes


def test_rows_of_one_length_are_marked_where_nothing_else_is_in_the_batch():
    collate = PackedCollate(padded, False, PAD, lambda: (8, 16), marks_equal_rows=True)
    assert collate([4, 4])[ROW_LENGTH] == 4
    assert collate([8])[ROW_LENGTH] == 8
    assert ROW_LENGTH not in collate([5, 3]), "other lengths"
    assert ROW_LENGTH not in collate([3, 3]), "filler"
    assert ROW_LENGTH not in PackedCollate(padded, False, PAD)([4, 4]), "not asked for"
    pieces = split_batch(collate([4, 4, 4, 4]), 3)
    assert [(piece[ROW_LENGTH], count_rows(piece), piece["input_ids"].shape[1]) for piece in pieces] == [
        (4, 3, 12),
        (4, 1, 4),
    ]
