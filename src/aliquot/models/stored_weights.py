"""The weights in the files of a directory as a store that can only be read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aliquot.ranges.bytemap import ByteMap, Shape
from aliquot.ranges.header import TensorEntry
from aliquot.ranges.parts import Part
from aliquot.ranges.reader import RangeReader

if TYPE_CHECKING:
    from torch import Tensor


class StoredWeights:
    def __init__(self, source: ByteMap, reader: RangeReader) -> None:
        self.entries = source.entries
        self._reader = reader

    def parts(self) -> Sequence[Part]:
        return [Part(entry.name, entry.shape, "weight", 0, entry.numel) for entry in self.entries.values()]

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._reader.read(self.entries[part.name], start, out)


def in_order(source: ByteMap) -> list[tuple[str, Shape]]:
    """Names and shapes, as they lie in the files."""
    return [(entry.name, entry.shape) for entry in sorted(source.entries.values(), key=_position)]


def _position(entry: TensorEntry) -> tuple[Path, int, int]:
    return entry.file, entry.offset, entry.numel
