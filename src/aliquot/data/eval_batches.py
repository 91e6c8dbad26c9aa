"""Build the batches of an evaluation: each rank's micro-batches of all sequences of a token store, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from typing import Self

import numpy as np
import numpy.typing as npt

from aliquot.config.schema import DataSection
from aliquot.data.micro_batch_rows import Group, Layout, SequenceFormat
from aliquot.data.packing import Packing
from aliquot.data.prepare import Prepared
from aliquot.data.token_store import Reference, TokenStore
from aliquot.data.workload import BatchSize
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.preference_loss import Objective


class EvalBatches:
    """The batches of an evaluation: each sequence of `store` once, in order. Raises UserError for an empty store."""

    def __init__(self, store: TokenStore, format: SequenceFormat, micro_batch_size: int) -> None:
        self.store, self.format, self.micro_batch_size = store, format, micro_batch_size
        self.epoch = Packing.of(store, format.length, format.packed).in_order()
        # The number of labels, pairs or rated answers on all ranks, by which the summed loss is divided.
        self.predicted = self.epoch.packing.labels

    @classmethod
    def of(
        cls, data: Prepared, section: DataSection, size: BatchSize, packs: bool = True, fills_up: bool = False
    ) -> dict[str, Self]:
        """Return the evaluation batches of a run by the name of their source; the name of unnamed data is ""."""
        format = SequenceFormat(section.sequence_length, data.pad_id, section.packing, packs, fills_up)
        return {name: cls(store, format, size.micro) for name, store in data.open_eval().items()}

    def with_objective(self, objective: Objective, reference: Reference | None = None) -> Self:
        """Return a copy of these batches for a loss of answers; see `Batches.with_objective`."""
        later = copy(self)
        later.format = self.format.with_objective(objective, [self.store])
        if reference is not None:
            later.store = replace(self.store, reference=reference)
        return later

    def with_micro_batches(self, sequences: int) -> Self:
        """Return a copy of these batches with `sequences` in a micro-batch."""
        later = copy(self)
        later.micro_batch_size = sequences
        return later

    def count(self, world_size: int) -> int:
        """Return the number of micro-batches of each rank."""
        return -(-self.epoch.packing.sequences // (world_size * self.micro_batch_size))

    def micro_batches(self, rank: int, world_size: int, first: int = 0) -> Iterator[MicroBatch | None]:
        """Yield this rank's micro-batches, the same number on every rank; None if the rank has no sequences left.

        `first`: the number of the first micro-batch of each rank.
        """
        return self._in_turns(range(first, self.count(world_size)), rank, world_size)

    def places(self, sequence: int) -> npt.NDArray[np.int64]:
        """Return the index in `TokenStore.reference` of all answers of a sequence."""
        places = self.store.places([start for start, _ in self.epoch.sequence(sequence)])
        return places if self.store.pairs else np.concatenate([places, places + 1])

    def first_and_last(self, rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        """Yield this rank's first and last micro-batch: packed micro-batches have no other lengths than these two."""
        return self._in_turns(sorted({0, self.count(world_size) - 1}), rank, world_size)

    def _in_turns(self, turns: Iterable[int], rank: int, world_size: int) -> Iterator[MicroBatch | None]:
        layout = Layout([self.store], self.format)
        size, stop = self.micro_batch_size, self.epoch.packing.sequences
        starts = (start for turn in turns for start in range(turn * world_size * size, stop, size)[:world_size])
        groups = (Group(0, start, range(start, min(start + size, stop))) for start in starts)
        micro_batches = layout.micro_batches(groups, rank, world_size, lambda _, at: self.epoch.sequence(at))
        return (micro_batch for _, micro_batch in micro_batches)
