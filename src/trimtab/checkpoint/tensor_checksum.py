"""Checksums of tensors, computed on the device where each tensor is: the same number on every device.

A tensor's bytes are read as 32-bit words. Each word is multiplied by an odd 64-bit number that depends on its position,
and the products are added modulo 2**64. An odd factor is invertible, so a change of any one word, and with it of any
one element, always changes the sum; other changes go unnoticed with a probability of about 2**-32. Integer sums do not
depend on the order of addition, so devices, threads and block sizes all give the same result.
"""

import hashlib
from collections.abc import Iterator, Sequence

import torch

from trimtab.checkpoint.tensor_file import as_bytes, in_order

_WORD_BYTES = 4
_ROW_WORDS = 2**16
_ROW_BYTES = _ROW_WORDS * _WORD_BYTES
_KIND = "sum64"


def checksums_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    """The checksum of each tensor, such as "sum64:00f1e2d3c4b5a697".

    One pass over the memory: about 4 GB/s on a CPU core, and on a GPU the share of its bandwidth that three elementwise
    kernels leave. Temporary memory is at most a few MiB, and each device is waited for once.

    Args:
        tensors: Strided tensors with memory, of any dtype and layout.
    """
    sums: dict[torch.device, list[torch.Tensor]] = {}
    weights: dict[torch.device, torch.Tensor] = {}
    longest = max((_num_words(tensor) for tensor in tensors), default=0)
    for tensor in tensors:
        if tensor.device not in weights:
            weights[tensor.device] = _odd_numbers("words", min(longest, _ROW_WORDS)).to(tensor.device)
        of_device = sums.setdefault(tensor.device, [])
        of_device += [_row_sums(block, weights[tensor.device]) for block in _blocks(tensor)]
    on_host = {device: torch.cat(parts).cpu() if parts else torch.empty(0) for device, parts in sums.items()}
    return [_of_rows(tensor, on_host) for tensor in tensors]


def _of_rows(tensor: torch.Tensor, sums: dict[torch.device, torch.Tensor]) -> str:
    """Combine the sums of a tensor's rows, which come first in `sums` and are taken out."""
    num_rows = -(-_num_words(tensor) // _ROW_WORDS)
    rows, sums[tensor.device] = sums[tensor.device][:num_rows], sums[tensor.device][num_rows:]
    total = int((rows * _odd_numbers("rows", num_rows)).sum())
    return f"{_KIND}:{total % 2**64:016x}"


def is_checksum(text: str) -> bool:
    """Whether a text is what `checksums_of` gives, and not the checksum of another kind."""
    return text.startswith(f"{_KIND}:")


def _row_sums(words: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each row of words, modulo 2**64: integer arithmetic of torch wraps."""
    return words.long().mul_(weights[: words.shape[1]]).sum(1)


def _blocks(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor's words as rows, a block at a time; the last row may be shorter, and then is a block of its own."""
    # a CPU wants what it works on in its cache, a GPU wants few and large kernels
    block_bytes = _ROW_BYTES * (1 if tensor.device.type == "cpu" else 16)
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    for part in in_order(tensor.detach()):
        flat = as_bytes(part)
        if rest.numel():  # the part before, of a tensor that is not contiguous, did not end with a row
            flat = torch.cat([rest, flat])
        whole = flat.numel() - flat.numel() % _ROW_BYTES
        for begin in range(0, whole, block_bytes):
            yield _as_words(flat[begin : min(begin + block_bytes, whole)]).view(-1, _ROW_WORDS)
        rest = flat[whole:]
    if rest.numel():
        yield _as_words(rest).view(1, -1)


def _as_words(block: torch.Tensor) -> torch.Tensor:
    missing = -block.numel() % _WORD_BYTES
    if missing:
        block = torch.cat([block, block.new_zeros(missing)])
    elif block.storage_offset() % _WORD_BYTES:
        block = block.clone()  # a view of memory that does not begin at a word
    return block.view(torch.int32)


def _num_words(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _WORD_BYTES)


def _odd_numbers(name: str, count: int) -> torch.Tensor:
    """The first of a fixed sequence of odd numbers that look random."""
    raw = bytearray(hashlib.shake_128(f"trimtab {name}".encode()).digest(8 * count))
    return torch.frombuffer(raw, dtype=torch.int64) | 1 if count else torch.empty(0, dtype=torch.int64)
