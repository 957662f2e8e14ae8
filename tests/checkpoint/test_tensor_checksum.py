"""Checksums of tensors: every element counts, and its position; devices, layouts and block sizes do not."""

import hashlib
from operator import mul

import pytest
import torch

from trimtab.checkpoint import tensor_checksum
from trimtab.checkpoint.tensor_checksum import checksums_of, is_checksum

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool)


def checksum_of(tensor):
    (found,) = checksums_of([tensor])
    assert is_checksum(found)
    return found


@pytest.fixture
def short_rows(monkeypatch):
    """Rows of 8 words, so that small tensors have many rows and several blocks."""
    monkeypatch.setattr(tensor_checksum, "_ROW_WORDS", 8)
    monkeypatch.setattr(tensor_checksum, "_ROW_BYTES", 32)


def tensor_of(dtype, size):
    numbers = torch.randint(0, 2 if dtype is torch.bool else 100, (size,), generator=torch.Generator().manual_seed(1))
    return numbers.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 31, 32, 33, 161])
@pytest.mark.usefixtures("short_rows")
def test_any_one_element_changes_it(dtype, size):
    """Also by its last bit alone, wherever it is: in a whole word, in half a word, in a short last row."""
    tensor = tensor_of(dtype, size)
    seen = {checksum_of(tensor)}
    raw = tensor.view(torch.uint8)
    for position in range(size):
        for bit in (0, 7):
            changed = tensor.clone()
            at = position * raw.numel() // size
            changed.view(torch.uint8)[at] = raw[at] ^ (1 << bit)
            seen.add(checksum_of(changed))
    assert len(seen) == 1 + 2 * size


@pytest.mark.usefixtures("short_rows")
def test_the_order_of_elements_counts():
    tensor = torch.arange(1.0, 41.0)
    seen = {checksum_of(tensor)}
    for one, other in ((0, 1), (0, 8), (7, 8), (3, 39)):
        swapped = tensor.clone()
        swapped[[one, other]] = tensor[[other, one]]
        seen.add(checksum_of(swapped))
    assert len(seen) == 5


@pytest.mark.usefixtures("short_rows")
def test_changes_of_two_signs_do_not_cancel_each_other():
    """The highest bit of a word is where a sum modulo a power of two forgets the most."""
    tensor = torch.ones(24)
    seen = set()
    for one in range(24):
        for other in range(one):
            changed = tensor.clone()
            changed[[one, other]] = -1.0
            seen.add(checksum_of(changed))
    assert len(seen) == 24 * 23 // 2
    assert checksum_of(tensor) not in seen


@pytest.mark.parametrize("row_words", [2**16, 8])
def test_the_layout_does_not_count(monkeypatch, row_words):
    monkeypatch.setattr(tensor_checksum, "_ROW_WORDS", row_words)
    monkeypatch.setattr(tensor_checksum, "_ROW_BYTES", 4 * row_words)
    plain = torch.randn(60, 40, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = checksum_of(plain)
    turned = plain.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not turned.is_contiguous()
    assert checksum_of(turned) == expected
    in_the_middle = torch.zeros(plain.numel() + 5, dtype=plain.dtype)[1:-4]  # does not begin at a word
    in_the_middle.copy_(plain.flatten())
    assert checksum_of(in_the_middle) == expected
    assert checksums_of([torch.zeros(3), turned.requires_grad_(), torch.empty(0), plain])[1::2] == [expected, expected]


def test_it_is_the_sum_that_checkpoints_hold():
    """Computed with Python's numbers: what is written today has to be found again by later versions."""
    num_words = 2**16 + 100
    words = torch.arange(num_words, dtype=torch.int32) * 77_777 - 5

    def odd_number(name, index):
        raw = hashlib.shake_128(f"trimtab {name}".encode()).digest(8 * (index + 1))
        return int.from_bytes(raw[-8:], "little") | 1

    raw = hashlib.shake_128(b"trimtab words").digest(8 * 2**16)
    factors = [int.from_bytes(raw[at : at + 8], "little") | 1 for at in range(0, len(raw), 8)]
    numbers = words.tolist()
    rows = [sum(map(mul, numbers[begin : begin + 2**16], factors)) for begin in (0, 2**16)]
    total = sum(row * odd_number("rows", index) for index, row in enumerate(rows)) % 2**64
    assert checksums_of([words, words[:0]]) == [f"sum64:{total:016x}", f"sum64:{0:016x}"]


def test_parts_of_large_tensors_that_are_not_contiguous(monkeypatch):
    """They are read in parts that need not end with a row."""
    monkeypatch.setattr("trimtab.checkpoint.tensor_file.PIECE_BYTES", 1000)
    plain = torch.randn(300, 70, generator=torch.Generator().manual_seed(0))
    wide = torch.zeros(300, 100)
    wide[:, :70] = plain
    assert checksum_of(wide[:, :70]) == checksum_of(plain)
    assert checksum_of(plain.t().contiguous().t()) == checksum_of(plain)
