"""All sequences of an evaluation store once, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Self

from aliquot.config.data_section import DataSection
from aliquot.data.batch_size import BatchSize
from aliquot.data.layout import Group, Layout, SequenceFormat
from aliquot.data.packing import Packing
from aliquot.data.prepare import Prepared
from aliquot.data.token_store import TokenStore
from aliquot.models.micro_batch import MicroBatch


class EvalBatches:
    """All sequences of a store once, in a fixed order. Raises UserError if there is none."""

    def __init__(self, store: TokenStore, format: SequenceFormat, micro_batch_size: int) -> None:
        self.store = store
        self.format = format
        self.micro_batch_size = micro_batch_size
        self.epoch = Packing.of(store, format.length, format.packed).in_order()
        self.predicted = int(self.epoch.predicted.sum())  # labels of all ranks, which divide the loss in the perplexity

    @classmethod
    def of(
        cls, data: Prepared, section: DataSection, size: BatchSize, packs: bool = True, fills_up: bool = False
    ) -> dict[str, Self]:
        """Return the evaluation batches of a run by name; the name of unnamed data is ""."""
        format = SequenceFormat(section.sequence_length, data.pad_id, section.packing, packs, fills_up)
        return {name: cls(store, format, size.micro) for name, store in data.open_eval().items()}

    def count(self, world_size: int) -> int:
        """Return the number of micro-batches of each rank."""
        return -(-self.epoch.packing.sequences // (world_size * self.micro_batch_size))

    def micro_batches(self, rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        """Yield this rank's micro-batches, the same number on every rank; None if the rank has no sequences left."""
        return self._in_turns(range(self.count(world_size)), rank, world_size)

    def first_and_last(self, rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        """Yield the first and the last micro-batch of this rank: packed ones may differ in length."""
        return self._in_turns(sorted({0, self.count(world_size) - 1}), rank, world_size)

    def _in_turns(self, turns: Iterable[int], rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        layout = Layout([self.store], self.format)
        size, stop = self.micro_batch_size, self.epoch.packing.sequences
        starts = (start for turn in turns for start in range(turn * world_size * size, stop, size)[:world_size])
        groups = (Group(0, start, range(start, min(start + size, stop))) for start in starts)
        for _, micro_batch in layout.micro_batches(groups, rank, world_size, lambda _, at: self.epoch.sequence(at)):
            yield micro_batch
