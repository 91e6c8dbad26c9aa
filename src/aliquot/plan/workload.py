"""What one optimizer step is fed: known once the data are tokenised, assumed before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from aliquot.config.batch_size import batch_size
from aliquot.config.schema import RunConfig


@dataclass(frozen=True)
class Workload:
    """Counts are means over the run, per sequence."""

    edges: tuple[int, ...]  # document edges of one sequence of `sequence_length`, a padded tail included
    tokens: float  # real ones
    predicted: float  # that have a label
    pairs: float  # (query, key) pairs of causal attention
    sequences: int | None  # of one epoch; None: not known before the data are read
    source: str  # where this comes from, for the reader

    @classmethod
    def assumed(cls, config: RunConfig, document_tokens: int | None = None) -> Self:
        """Documents of `document_tokens`, or each as long as a sequence: what memory is largest for."""
        length = config.data.sequence_length
        each = min(document_tokens or length, length)
        count = length // each if config.data.packing else 1
        edges = tuple(each * i for i in range(count + 1))
        pairs = count * each * (each + 1) / 2
        said = f"documents of {each:,} tokens" + ("" if document_tokens else ", assumed: one a sequence")
        full = edges if edges[-1] == length else (*edges, length)
        return cls(full, count * each, count * (each - 1), pairs, None, said)

    def micro_batch(self, sequences: int) -> tuple[int, ...]:
        """Edges of a row of so many sequences."""
        length = self.edges[-1]
        return (0, *(row * length + edge for row in range(sequences) for edge in self.edges[1:]))


def total_steps(config: RunConfig, workload: Workload, world_size: int) -> int | None:
    """Optimizer steps of the run; None where neither max_steps nor the size of the data tells."""
    if config.train.max_steps is not None:
        return config.train.max_steps
    if workload.sequences is None:
        return None
    epochs = math.ceil(config.train.num_train_epochs * workload.sequences)
    return -(-epochs // batch_size(config.train, world_size).total)
