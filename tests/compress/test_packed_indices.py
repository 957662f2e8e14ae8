"""Packed indices: exact for every number of bits, in the documented layout."""

import pytest
import torch

from trimtab.compress.packed_indices import pack, packed_size, unpack


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 64, 101])
def test_unpack_returns_what_was_packed(bits, size):
    indices = torch.randint(0, 2**bits, (3, size), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack(indices, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, packed_size(size, bits))
    assert torch.equal(unpack(packed, bits, size), indices)


@pytest.mark.parametrize("bits", range(1, 9))
def test_bits_are_in_the_documented_order(bits):
    indices = torch.randint(0, 2**bits, (21,), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    stream = sum(int(index) << (place * bits) for place, index in enumerate(indices))
    assert bytes(pack(indices, bits).tolist()) == stream.to_bytes(packed_size(21, bits), "little")


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match="5 indices of 4 bits are not 2 bytes"):
        unpack(torch.zeros(2, dtype=torch.uint8), 4, 5)
    with pytest.raises(ValueError, match="9 bits"):
        pack(torch.zeros(2, dtype=torch.uint8), 9)
