"""Between files and a store of parts, in bounded pieces: `fill` reads what the store owns, `drain` writes it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from aliquot.ranges.checksums import BlockChecksums
from aliquot.ranges.header import TensorEntry
from aliquot.ranges.parts import Kind, Part, PartStore
from aliquot.ranges.reader import BUFFER_BYTES, RangeReader
from aliquot.ranges.writer import RangeWriter

Maps = Mapping[Kind, Mapping[str, TensorEntry]]  # where the tensors of each kind lie; other kinds stay untouched


def fill(store: PartStore, maps: Maps, checksums: BlockChecksums | None = None) -> int:
    """Read all parts of `store` whose kind is in `maps`; the bytes read. Raises UserError."""
    buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32)
    with RangeReader(checksums) as reader:
        for part, entry in _in_file_order(store, maps):
            for start in range(part.start, part.stop, buffer.numel()):
                piece = buffer[: part.stop - start]
                reader.read(entry, start, piece)
                store.write(part, start, piece)
        return reader.read_bytes


def drain(store: PartStore, maps: Maps, checksums: BlockChecksums | None = None) -> int:
    """Write all parts of `store` whose kind is in `maps`, and fsync; the bytes written. Raises UserError."""
    buffer = torch.empty(BUFFER_BYTES // 4, dtype=torch.float32)
    with RangeWriter(checksums) as writer:
        for part, entry in _in_file_order(store, maps):
            for start in range(part.start, part.stop, buffer.numel()):
                piece = buffer[: part.stop - start]
                store.read(part, start, piece)
                writer.write(entry, start, piece)
    return writer.written_bytes


def _in_file_order(store: PartStore, maps: Maps) -> list[tuple[Part, TensorEntry]]:
    pairs = [(part, maps[part.kind][part.name]) for part in store.parts() if part.kind in maps]
    return sorted(pairs, key=lambda pair: (pair[1].file, pair[1].offset, pair[0].start))
