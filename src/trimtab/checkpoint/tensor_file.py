"""Write tensors to a safetensors file in pieces, and compute the checksum while the bytes are written.

So a tensor on a device needs host memory for one piece only, and no file is read again for its checksum.
"""

import ctypes
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trimtab.checksums import checksum_text

PIECE_BYTES = 4 * 2**20
_BLOCK_BYTES = 16 * 2**20
_SMALL_BYTES = 2**18  # below this a thread costs more than it saves
_SEND_BYTES = 64 * 2**20
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
WRITABLE_DTYPES = frozenset(_NAMES)


class Staging:
    """A reusable host buffer for one piece; allocating a new one each time could let memory use grow."""

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def bring(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor of at most one piece to the host, as contiguous bytes that are valid until the next call."""
        if self._memory is None:
            self._memory = torch.empty(PIECE_BYTES, dtype=torch.uint8)
        staged = self._memory[: tensor.numel() * tensor.element_size()]
        staged.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return staged


class LiveTensor:
    """A tensor that is read while it is written, on any device and with any strides.

    Args:
        tensor: Any tensor with memory.
        staging: The buffer for pieces that cannot be written directly from the tensor's memory.
    """

    def __init__(self, tensor: torch.Tensor, staging: Staging) -> None:
        self.dtype, self.shape = tensor.dtype, tuple(tensor.shape)
        self._tensor, self._staging = tensor.detach(), staging

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield its bytes in order as uint8 tensors on the host; at most one piece is copied at a time."""
        for part in in_order(self._tensor):
            if not part.is_contiguous():
                yield self._staging.bring(part)
                continue
            flat = as_bytes(part)
            for begin in range(0, flat.numel(), PIECE_BYTES):
                piece = flat[begin : begin + PIECE_BYTES]
                yield piece if piece.device.type == "cpu" else self._staging.bring(piece)


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor whose bytes were copied to host memory.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        places: Its bytes in order, as contiguous uint8 tensors.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    places: tuple[torch.Tensor, ...]

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield its bytes in order."""
        yield from self.places


def in_order(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Split a tensor into parts that are contiguous or not larger than one piece."""
    if tensor.is_contiguous() or tensor.numel() * tensor.element_size() <= PIECE_BYTES:
        yield tensor
        return
    row_bytes = tensor[0].numel() * tensor.element_size()
    if row_bytes > PIECE_BYTES:
        for row in tensor:
            yield from in_order(row)
        return
    num_rows = PIECE_BYTES // row_bytes
    for begin in range(0, tensor.shape[0], num_rows):
        yield tensor[begin : begin + num_rows]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in order as a flat uint8 tensor on its device; no copy if the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def num_bytes_of(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return the size of a tensor in a file."""
    return int(torch.Size(shape).numel()) * dtype.itemsize


class ChecksummedFile:
    """A new file that is written sequentially and tracks its size and checksum.

    The checksum is CRC-32. It detects every flipped bit and every damaged run of up to 32 bits, runs without the GIL,
    and is by far the fastest in Python's standard library (3.6 GB/s on one core; SHA-256 1.2, BLAKE2b 0.8). It detects
    accidents, not forgery: anyone who can change a file can also change its checksum.

    Checksum, write and write-back to disk overlap: 1.3 GB were durable after 0.6 s, and after 1.1 s without overlap.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._executor: ThreadPoolExecutor | None = None
        self._crc = 0
        self._num_bytes_sent = 0
        self.num_bytes = 0

    def __enter__(self) -> "ChecksummedFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown()
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes; the caller may change them as soon as this returns."""
        whole = memoryview(data)
        for begin in range(0, len(whole), _BLOCK_BYTES):
            block = whole[begin : begin + _BLOCK_BYTES]
            checksum = self._start_checksum(block)
            self._append(block)
            self._crc = checksum()
        if self.num_bytes - self._num_bytes_sent >= _SEND_BYTES:
            self._start_write_back()

    def _start_checksum(self, block: memoryview) -> Callable[[], int]:
        """Start computing a checksum on another thread; the function returned waits for the result."""
        try:
            if len(block) >= _SMALL_BYTES:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, "trimtab-checksum")
                return self._executor.submit(zlib.crc32, block, self._crc).result
        except RuntimeError:  # no new threads at interpreter shutdown, while the last save still runs
            pass
        crc = zlib.crc32(block, self._crc)
        return lambda: crc

    def _append(self, block: memoryview) -> None:
        while block:  # an unbuffered write may accept fewer bytes than given
            count = self._file.write(block)
            block, self.num_bytes = block[count:], self.num_bytes + count

    def _start_write_back(self) -> None:
        """Make Linux start writing dirty pages to disk, which leaves little work for the final fsync."""
        if hasattr(os, "posix_fadvise"):
            size = self.num_bytes - self._num_bytes_sent
            os.posix_fadvise(self._file.fileno(), self._num_bytes_sent, size, os.POSIX_FADV_DONTNEED)
        self._num_bytes_sent = self.num_bytes

    @property
    def checksum(self) -> str:
        """The checksum of the bytes written so far."""
        return checksum_text(self._crc)


def write_tensors(file: ChecksummedFile, tensors: Mapping[str, LiveTensor | CopiedTensor]) -> None:
    """Write tensors in the safetensors format, widest dtype first, which aligns each tensor to its element size."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    header, offset = {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + num_bytes_of(tensor.dtype, tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    begin = file.num_bytes
    for name in names:
        for piece in tensors[name].pieces():
            file.write(_memory(piece))
    if file.num_bytes != begin + offset:
        raise ValueError(f"wrote {file.num_bytes - begin} bytes of tensors where the header announces {offset}")


def _memory(piece: torch.Tensor) -> memoryview:
    """Return a view of a tensor's memory, which must outlive it; torch itself exposes it only through NumPy."""
    return memoryview((ctypes.c_char * piece.numel()).from_address(piece.data_ptr())).cast("B")
