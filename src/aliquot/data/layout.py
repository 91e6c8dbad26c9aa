"""How sequences of tokens become the rows of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from aliquot.data.token_store import TokenStore
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.loss.base import IGNORE
from aliquot.nn.row_counts import filler

Pieces = list[tuple[int, int]]  # (start, length) in its store of each piece of a sequence


@dataclass(frozen=True)
class Group:
    """The sequences of a micro-batch."""

    source: int
    first: int  # the first of them in the order of all sources
    sequences: Sequence[int]  # in the order of the source


@dataclass(frozen=True)
class Layout:
    """Packed sequences are padded to the full length on their right, where the model `packs` them in one call too.

    `fills_up`: micro-batches of sequences that are not packed get one of few lengths, by short documents of padding.
    """

    stores: Sequence[TokenStore]
    sequence_length: int
    pad_id: int
    packed: bool
    packs: bool
    fills_up: bool = False

    def micro_batches(
        self, groups: Iterable[Group], rank: int, world_size: int, sequence: Callable[[int, int], Pieces]
    ) -> Iterator[tuple[int, MicroBatch | None]]:
        """This rank's share of the micro-batches, and where each begins; equally many on every rank.

        Where each document is a call, a rank without sequences gets a micro-batch that only makes the calls.
        """
        coming = iter(groups)
        while turn := list(islice(coming, world_size)):
            calls = 0
            if not self.packs:  # ranks make equally many
                calls = max(sum(len(sequence(group.source, at)) for at in group.sequences) for group in turn)
            if rank < len(turn):
                group = turn[rank]
                yield (
                    group.first,
                    self._row(group.source, [sequence(group.source, at) for at in group.sequences], calls),
                )
            else:
                yield 0, MicroBatch.empty(calls) if calls else None

    def _row(self, source: int, sequences: list[Pieces], calls: int) -> MicroBatch:
        store, pieces = self.stores[source], list[tuple[int, int]]()  # (start, length), padding from nowhere
        for sequence in sequences:
            room = self.sequence_length - sum(length for _, length in sequence)
            pieces += [*sequence, *([(-1, room)] if room and self.packed and self.packs else [])]
        if self.fills_up:
            tokens = sum(length for _, length in pieces)
            pieces += [(-1, length) for length in filler(tokens, len(sequences), self.sequence_length)]
        edges = np.concatenate([[0], np.cumsum([length for _, length in pieces])])
        ids = np.full(edges[-1], self.pad_id, np.int64)
        labels = np.full(edges[-1], IGNORE, np.int64)
        for (start, length), at in zip(pieces, edges.tolist(), strict=False):
            if start < 0:
                continue
            ids[at : at + length] = store.tokens[start : start + length]
            labels[at : at + length - 1] = ids[at + 1 : at + length]
            if store.mask is not None:
                unsaid = store.mask[start + 1 : start + length] == 0
                labels[at : at + length - 1][unsaid] = IGNORE
        positions = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))
        of_ids, of_labels, of_positions = (torch.from_numpy(array) for array in (ids, labels, positions))
        return MicroBatch(of_ids, of_labels, of_positions, tuple(edges.tolist()), calls=calls, source=source)
