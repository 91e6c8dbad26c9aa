"""Lay sequences of tokens out as rows of micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from aliquot.data.token_store import TokenStore
from aliquot.models.micro_batch import MicroBatch
from aliquot.nn.head_loss import IGNORE
from aliquot.nn.product_shapes import filler

Pieces = list[tuple[int, int]]  # (start, length) in the store of each piece of a sequence


@dataclass(frozen=True)
class Group:
    """The sequences of a micro-batch."""

    source: int
    first: int  # the first sequence, in the order of all sources
    sequences: Sequence[int]  # in the order of the source


@dataclass(frozen=True)
class SequenceFormat:
    """How documents become sequences, and sequences the rows that a model reads.

    Args:
        length: tokens of a sequence, at most.
        pad_id: the token that fills padding; its labels are ignored.
        packed: whether several documents share a sequence.
        model_packs: whether the model takes several documents in one call; else each document is a call.
        fills_up: whether rows of sequences that are not packed are filled up to one of a few lengths.
    """

    length: int
    pad_id: int
    packed: bool
    model_packs: bool = True
    fills_up: bool = False

    @property
    def pads_sequences(self) -> bool:
        """Whether each sequence is padded to its full length."""
        return self.packed and self.model_packs

    @property
    def fills_rows(self) -> bool:
        """Whether documents of padding fill a row up, so that oneDNN meets few shapes."""
        return self.fills_up and self.model_packs and not self.packed


@dataclass(frozen=True)
class Layout:
    """Lay sequences out as micro-batches: each micro-batch is one row, with padding on the right of each sequence."""

    stores: Sequence[TokenStore]
    format: SequenceFormat

    def micro_batches(
        self, groups: Iterable[Group], rank: int, world_size: int, sequence: Callable[[int, int], Pieces]
    ) -> Iterator[tuple[int, MicroBatch | None]]:
        """Yield (first sequence, micro-batch) of this rank, the same number on every rank; None without sequences.

        If each document is a call of the model, a rank without sequences gets a micro-batch that only makes the calls.
        """
        coming = iter(groups)
        while turn := list(islice(coming, world_size)):
            calls = 0
            if not self.format.model_packs:  # every rank must make the same number of calls
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
        store, pieces = self.stores[source], list[tuple[int, int]]()  # (start, length); padding has start -1
        for sequence in sequences:
            room = self.format.length - sum(length for _, length in sequence)
            pieces += [*sequence, *([(-1, room)] if room and self.format.pads_sequences else [])]
        if self.format.fills_rows:
            tokens = sum(length for _, length in pieces)
            pieces += [(-1, length) for length in filler(tokens, len(sequences), self.format.length)]
        edges = np.concatenate([[0], np.cumsum([length for _, length in pieces])])
        ids = np.full(edges[-1], self.format.pad_id, np.int64)
        labels = np.full(edges[-1], IGNORE, np.int64)
        for (start, length), at in zip(pieces, edges.tolist(), strict=False):
            if start < 0:
                continue
            ids[at : at + length] = store.tokens[start : start + length]
            labels[at : at + length - 1] = ids[at + 1 : at + length]
            if store.mask is not None:
                unlearned = store.mask[start + 1 : start + length] == 0
                labels[at : at + length - 1][unlearned] = IGNORE
        positions = np.arange(edges[-1]) - np.repeat(edges[:-1], np.diff(edges))
        id_row, label_row, position_row = (torch.from_numpy(array) for array in (ids, labels, positions))
        return MicroBatch(id_row, label_row, position_row, tuple(edges.tolist()), calls=calls, source=source)
