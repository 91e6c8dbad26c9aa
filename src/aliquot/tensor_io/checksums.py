"""Checksums of the blocks of files that several ranks read or write in pieces.

Each rank computes checksums of the pieces that it reads or writes, and adds them up to its share of the checksum of
each block. The exclusive-or of the shares of all ranks is the checksum of the block. So no rank reads a block again,
and ranks exchange a few bytes per block, however many tensors and ranks there are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt

from aliquot.core.on_rank_0 import RankGroup
from aliquot.core.small_files import open_regular

BLOCK_BYTES = 16 << 20
_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
_INDEX_BITS = 8  # of a table of powers; three tables cover the positions in a block

Integers = npt.NDArray[np.int64]


@dataclass
class BlockChecksums:
    """Collects checksums of the pieces that this rank reads or writes. Several threads may call `add` at once."""

    block_bytes: int = BLOCK_BYTES
    _pieces: list[tuple[str, int, int, int]] = field(default_factory=list)  # file, offset, length, crc32, in one block

    def add(self, file: str, offset: int, data: memoryview) -> None:
        """Add the checksum of `data`, the bytes of `file` from `offset`."""
        while data:
            rest_of_block = self.block_bytes - offset % self.block_bytes
            self._pieces.append((file, offset, len(data[:rest_of_block]), zlib.crc32(data[:rest_of_block])))
            offset += len(data[:rest_of_block])
            data = data[rest_of_block:]

    def shares(self, file_bytes: Mapping[str, int]) -> BlockShares:
        """Return this rank's share of the checksums of all blocks of the given files; ignore pieces of other files.

        Raises ValueError if a piece ends behind its file.
        """
        shares = BlockShares.empty(file_bytes, self.block_bytes)
        first = shares.first_blocks()
        pieces = [
            (first[file] + offset // self.block_bytes, offset, length, crc, file_bytes[file])
            for file, offset, length, crc in self._pieces
            if file in first
        ]
        if pieces:
            index, offset, length, crc, total = np.array(pieces, np.int64).T
            start = offset % self.block_bytes
            end = start + length
            bytes_after = np.minimum(self.block_bytes, total - (offset - start)) - end  # in the block
            if (bytes_after < 0).any():
                raise ValueError("a part of a tensor ends behind the end of its file")
            np.bitwise_xor.at(shares.crc32, index, _append_bytes(crc, bytes_after))
            np.add.at(shares.covered, index, _mark(end) - _mark(start))
        return shares


@dataclass(frozen=True)
class BlockShares:
    """A share of the checksums of all blocks of some files: of one rank, or of all ranks."""

    file_bytes: Mapping[str, int]
    block_bytes: int
    crc32: Integers  # [blocks], in the order of the files' names
    # [blocks]: the sum over all pieces of mark(end) - mark(start), of their positions in the block. Marks of inner
    # positions cancel only if a piece begins where another ends, so that all pieces cover each byte exactly once.
    covered: Integers

    @classmethod
    def empty(cls, file_bytes: Mapping[str, int], block_bytes: int = BLOCK_BYTES) -> BlockShares:
        blocks = sum(-(-size // block_bytes) for size in file_bytes.values())
        return cls(file_bytes, block_bytes, np.zeros(blocks, np.int64), np.zeros(blocks, np.int64))

    def first_blocks(self) -> dict[str, int]:
        """Return the index of the first block of each file."""
        names = sorted(self.file_bytes)
        counts = (-(-self.file_bytes[name] // self.block_bytes) for name in names)
        return dict(zip(names, accumulate(counts, initial=0), strict=False))

    def plus(self, other: BlockShares) -> BlockShares:
        """Return the sum with the share of other pieces of the same files."""
        return replace(self, crc32=self.crc32 ^ other.crc32, covered=self.covered + other.covered)

    def combine(self, ranks: RankGroup) -> BlockShares:
        """Return the sum of the shares of all ranks. Collective."""
        return replace(self, crc32=ranks.combine(self.crc32, "xor"), covered=ranks.combine(self.covered, "sum"))

    def with_headers(self, header_bytes: Mapping[Path, int]) -> BlockShares:
        """Return the sum with the headers of the files, of the lengths `header_bytes`, which are read. Raises OSError.

        No rank reads or writes a header together with its tensors.
        """
        headers = BlockChecksums(self.block_bytes)
        for path, count in header_bytes.items():
            with open_regular(path) as file:
                headers.add(path.name, 0, memoryview(file.read(count)))
        return self.plus(headers.shares(self.file_bytes))

    def blocks(self) -> dict[str, list[int]]:
        """Return the crc32 of every block of each file.

        Raises ValueError if pieces omit or repeat bytes. The ranks' shards then do not cover each tensor exactly once.
        """
        blocks: dict[str, list[int]] = {}
        for name, first in self.first_blocks().items():
            size, count = self.file_bytes[name], -(-self.file_bytes[name] // self.block_bytes)
            lengths = np.minimum(self.block_bytes, size - np.arange(count, dtype=np.int64) * self.block_bytes)
            wrong = self.covered[first : first + count] != _mark(lengths) - _mark(np.zeros_like(lengths))
            if wrong.any():
                place = int(wrong.argmax()) * self.block_bytes
                raise ValueError(f"the parts of all ranks leave out or repeat bytes of {name} after byte {place}")
            blocks[name] = self.crc32[first : first + count].tolist()
        return blocks


def _mark(position: Integers) -> Integers:
    """Return a random number below 2^40 for each position, always the same one (SplitMix64; Steele et al., 2014)."""
    mixed = position.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> np.uint64(shift)) * np.uint64(factor)
    return (mixed >> np.uint64(24)).astype(np.int64)  # a block of 2^24 pieces still adds up in 64 bits


# zlib's crc32_combine for arrays: compute the CRC-32 of a concatenation from the CRCs of its pieces. A CRC is a
# polynomial over GF(2) modulo P; appending n bytes multiplies the polynomial by x^(8n) (zlib 1.2.12, crc32.c). Bits are
# reflected: the highest bit of the word is the coefficient of x^0. CRCs of pieces, each multiplied by the power for the
# bytes after it, add up to the CRC of the whole.


def _append_bytes(crc32: Integers, count: Integers) -> Integers:
    """Multiply each CRC by the power of x for the number of bytes that follow its piece. `count` is below 2^24."""
    for position, table in enumerate(_powers()):
        digit = (count >> (position * _INDEX_BITS)) % len(table)
        if digit.any():
            crc32 = _multiply(table[digit], crc32)
    return crc32


def _multiply(a: Integers, b: Integers) -> Integers:
    """Compute a times b modulo P, element by element."""
    product = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.int64)
    for bit in reversed(range(32)):
        product ^= b * (a >> bit & 1)
        b = b >> 1 ^ _POLYNOMIAL * (b & 1)
    return product


@cache
def _powers() -> tuple[Integers, ...]:
    """Return tables of x^(8 n): for n below 256, for multiples of 256 up to 2^16, and for multiples of 2^16."""
    tables = []
    power = np.array([_ONE >> 8], np.int64)  # x^8
    for _ in range(3):
        table = np.array([_ONE], np.int64)
        for _ in range(_INDEX_BITS):
            table = np.concatenate([table, _multiply(table, power)])
            power = _multiply(power, power)
        tables.append(table)
    return tuple(tables)
