"""The weights in the files of a directory as a store that can only be read, of which each rank has its rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from aliquot.core.on_rank_0 import RankGroup, SingleRank
from aliquot.tensor_io.bytemap import ByteMap, Shape
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import Part, row_ranges
from aliquot.tensor_io.range_io import RangeReader

if TYPE_CHECKING:
    from torch import Tensor


class StoredWeights:
    def __init__(self, source: ByteMap, reader: RangeReader, ranks: RankGroup = SingleRank()) -> None:  # noqa: B008 (it holds nothing)
        self.entries = source.entries
        self._reader = reader
        self._ranks = ranks

    def parts(self) -> Sequence[Part]:
        every = [
            Part(entry.name, entry.shape, "weight", *row_ranges(entry.shape, self._ranks.world_size)[self._ranks.rank])
            for entry in self.entries.values()
        ]
        return [part for part in every if part.numel]

    def read(self, part: Part, start: int, out: Tensor) -> None:
        self._reader.read(self.entries[part.name], start, out)


def in_order(source: ByteMap) -> list[tuple[str, Shape]]:
    """Names and shapes, as they lie in the files."""
    return [(entry.name, entry.shape) for entry in sorted(source.entries.values(), key=_position)]


def _position(entry: TensorEntry) -> tuple[Path, int, int]:
    return entry.file, entry.offset, entry.numel
