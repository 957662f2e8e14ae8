"""Checksums of files, as checkpoints, runs and their best models store them."""

import zlib
from pathlib import Path


def checksum_text(crc: int) -> str:
    """Format a checksum with the name of its algorithm, which allows others to be added later."""
    return f"crc32:{crc:08x}"


def checksum_of(path: Path) -> str:
    """Compute the checksum of an existing file."""
    return checksum_text(crc_of(path))


def crc_of(path: Path) -> int:
    """Compute the CRC-32 of an existing file, which `zlib.crc32` can continue."""
    crc, buffer = 0, memoryview(bytearray(4 * 2**20))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(buffer[:count], crc)
    return crc
