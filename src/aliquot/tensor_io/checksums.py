"""Block checksums of files that several ranks read or wrote in pieces: every rank checksums its own bytes once, and the
pieces combine to the checksum of each block without anybody reading a byte for it.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from aliquot.tensor_io.crc import crc32_combine

BLOCK_BYTES = 16 << 20

Piece = tuple[str, int, int, int]  # file name, offset, length in bytes, crc32; never across a block boundary


class BlockChecksums:
    """The pieces that this rank has read or written; several threads may add theirs at once."""

    def __init__(self, block_bytes: int = BLOCK_BYTES) -> None:
        self.block_bytes = block_bytes
        self._pieces: list[Piece] = []

    def add(self, file: str, offset: int, data: memoryview) -> None:
        """Bytes `data` lie at `offset` of `file`."""
        while data:
            room = self.block_bytes - offset % self.block_bytes
            self._pieces.append((file, offset, len(data[:room]), zlib.crc32(data[:room])))
            offset += len(data[:room])
            data = data[room:]

    def add_heads(self, head_bytes: Mapping[Path, int]) -> None:
        """Read the first so many bytes of each file, those before its tensors, and add them. Raises OSError."""
        for path, count in head_bytes.items():
            with path.open("rb") as file:
                self.add(path.name, 0, memoryview(file.read(count)))

    def pieces(self) -> list[Piece]:
        return self._pieces


def combine_pieces(
    pieces: Iterable[Piece], file_bytes: Mapping[str, int], block_bytes: int = BLOCK_BYTES
) -> dict[str, list[int]]:
    """The crc32 of every block of every file in `file_bytes`, from pieces of all ranks in any order.

    Raises ValueError where the pieces leave a byte out or hold it twice: the ranks' parts do not divide the tensors.
    """
    by_file: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
    for file, offset, length, crc in pieces:
        by_file[file].append((offset, length, crc))
    blocks: dict[str, list[int]] = {}
    for file, total_bytes in file_bytes.items():
        blocks[file] = []
        end = 0
        for offset, length, crc in sorted(by_file[file]):
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
