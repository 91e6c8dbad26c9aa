"""Checksums of the blocks of files that several ranks read or write in pieces.

Each rank computes checksums of the pieces that it reads or writes. The checksums of pieces are then combined into the
checksum of each block, so that no rank reads a block again.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

BLOCK_BYTES = 16 << 20
_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000

Piece = tuple[str, int, int, int]  # file name, offset, length in bytes, crc32; no piece crosses a block boundary


class BlockChecksums:
    """Collects checksums of the pieces that this rank reads or writes. Several threads may call `add` at once."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._pieces: list[Piece] = []

    def add(self, file: str, offset: int, data: memoryview) -> None:
        """Add the checksum of `data`, the bytes of `file` from `offset`."""
        while data:
            rest_of_block = self.block_bytes - offset % self.block_bytes
            self._pieces.append((file, offset, len(data[:rest_of_block]), zlib.crc32(data[:rest_of_block])))
            offset += len(data[:rest_of_block])
            data = data[rest_of_block:]

    def add_headers(self, header_bytes: Mapping[Path, int]) -> None:
        """Read the header of each file and add its checksum. Raises OSError.

        `header_bytes`: the length in bytes of the header of each file.
        """
        for path, count in header_bytes.items():
            with path.open("rb") as file:
                self.add(path.name, 0, memoryview(file.read(count)))

    def pieces(self) -> list[Piece]:
        return self._pieces


def combine_pieces(
    pieces: Iterable[Piece], file_bytes: Mapping[str, int], block_bytes: int = BLOCK_BYTES
) -> dict[str, list[int]]:
    """Compute the crc32 of every block of each file from the pieces of all ranks, which may be in any order.

    Raises ValueError if the pieces omit or repeat bytes. The ranks' shards then do not cover each tensor exactly once.
    """
    pieces_of: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for file, offset, length, crc in pieces:
        pieces_of[file].append((offset, length, crc))
    blocks: dict[str, list[int]] = {}
    for file, total_bytes in file_bytes.items():
        blocks[file] = []
        end = 0
        for offset, length, crc in sorted(pieces_of[file]):
            if offset != end:
                raise ValueError(f"the parts of all ranks leave out or repeat bytes {offset} to {end} of {file}")
            if offset % block_bytes == 0:
                blocks[file].append(crc)
            else:
                blocks[file][-1] = crc32_combine(blocks[file][-1], crc, length)
            end += length
        if end != total_bytes:
            raise ValueError(f"the parts of all ranks end at byte {end} of {file}, not at {total_bytes}")
    return blocks


# zlib's crc32_combine in Python: compute the CRC-32 of a concatenation from the CRCs of its pieces. A CRC is a
# polynomial over GF(2) modulo P; appending n bytes multiplies the polynomial by x^(8n) (zlib 1.2.12, crc32.c). Bits are
# reflected: the highest bit of the word is the coefficient of x^0.


def crc32_combine(first: int, second: int, second_bytes: int) -> int:
    """Compute the CRC-32 of a + b from the CRCs of a and b and the length of b."""
    return _multiply(_shift(second_bytes), first) ^ second


def _multiply(a: int, b: int) -> int:
    """Compute a times b modulo P."""
    product = 0
    bit = _ONE
    while a:
        if a & bit:
            product ^= b
            a ^= bit
        bit >>= 1
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product


@lru_cache(maxsize=4096)  # pieces have few different lengths, so that the cache hits often
def _shift(length_bytes: int) -> int:
    """Compute x^(8 length) modulo P."""
    result = _ONE
    power = 3  # 8 = 2^3
    while length_bytes:
        if length_bytes & 1:
            result = _multiply(_squared(power), result)
        length_bytes >>= 1
        power += 1
    return result


@cache
def _squared(times: int) -> int:
    """Compute x^(2^times) modulo P."""
    if times == 0:
        return _ONE >> 1
    root = _squared(times - 1)
    return _multiply(root, root)
