"""Indices of 1 to 8 bits, packed into bytes.

Layout: the indices of a row (a flat sequence) are one stream of bits. Index i occupies the bits i·b to i·b + b - 1 of
the stream, its least significant bit first; bit k of the stream is bit k % 8 of byte k // 8, counted from the least
significant one. The last byte is padded with zeros. With 4 bits, byte 0 is index 0 + 16 · index 1; with 3 bits, an
index can span two bytes, and 8 indices fill 3 bytes exactly. Rows are padded separately, so each starts at a byte.
"""

import torch
from torch import Tensor


def packed_size(num_indices: int, bits: int) -> int:
    """Return the number of bytes of a row of indices."""
    return (num_indices * bits + 7) // 8


def pack(indices: Tensor, bits: int) -> Tensor:
    """Pack the last dimension of integers below 2**bits into uint8."""
    _check_bits(bits)
    num_indices = indices.shape[-1]
    period = _period(bits)  # indices that fill whole bytes
    padded = torch.nn.functional.pad(indices.to(torch.uint8), (0, -num_indices % period))
    chunks = padded.view(*padded.shape[:-1], -1, period).to(torch.int64)
    shifts = torch.arange(period, device=indices.device) * bits
    words = (chunks << shifts).sum(-1)  # at most 56 bits
    num_bytes = period * bits // 8
    parts = [(words >> (8 * byte)) & 255 for byte in range(num_bytes)]
    packed = torch.stack(parts, -1).to(torch.uint8).flatten(-2)
    return packed[..., : packed_size(num_indices, bits)].contiguous()


def unpack(packed: Tensor, bits: int, num_indices: int) -> Tensor:
    """Return the indices of `pack`, as uint8."""
    _check_bits(bits)
    if packed.shape[-1] != packed_size(num_indices, bits):
        raise ValueError(f"{num_indices} indices of {bits} bits are not {packed.shape[-1]} bytes")
    if bits == 8:
        return packed
    if 8 % bits == 0:  # no index lies in two bytes
        shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
        parts: Tensor = (packed.unsqueeze(-1) >> shifts) & (2**bits - 1)
        return parts.flatten(-2)[..., :num_indices]
    period = _period(bits)
    num_bytes = period * bits // 8
    padded = torch.nn.functional.pad(packed, (0, -packed.shape[-1] % num_bytes))
    chunks = padded.view(*padded.shape[:-1], -1, num_bytes).to(torch.int64)
    words = (chunks << (8 * torch.arange(num_bytes, device=packed.device))).sum(-1, keepdim=True)
    indices: Tensor = (words >> (bits * torch.arange(period, device=packed.device))) & (2**bits - 1)
    return indices.to(torch.uint8).flatten(-2)[..., :num_indices]


def _period(bits: int) -> int:
    """Return the smallest number of indices that fills whole bytes."""
    return {1: 8, 2: 4, 4: 2, 6: 4, 8: 1}.get(bits, 8)


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= 8:
        raise ValueError(f"indices of {bits} bits cannot be packed: 1 to 8")
