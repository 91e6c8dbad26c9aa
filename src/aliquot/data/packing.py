"""Documents -> pieces of at most `sequence_length` tokens -> sequences of whole pieces; all as flat arrays.

Best-fit decreasing, done on the histogram of piece lengths: all pieces of one length are placed in a few range
operations, so that the work grows with the number of different lengths. It fixes which lengths share a sequence; which
pieces those are, and the order of the sequences, is shuffled anew in each epoch. So every epoch has the same number of
sequences, and the position of any step is found without looking at the epochs before it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.config.workload import MAPPED_PIECES
from aliquot.data.kept_arrays import Arrays, kept_arrays
from aliquot.data.token_store import TokenStore
from aliquot.errors import DataError

Ints = npt.NDArray[np.int64]

_DOCUMENTS_AT_ONCE = 1 << 16
_KEPT_EPOCHS = 4  # of a packing, on disk: two runs with two epochs each


@dataclass(frozen=True)
class Pieces:
    """P runs of tokens of a store, in its order. `predicted` counts the tokens of a piece that are labels in it."""

    start: Ints  # [P], index of the first token in the store
    length: npt.NDArray[np.int32]  # [P], 2 .. sequence_length
    predicted: npt.NDArray[np.int32]  # [P], >= 1


def split(store: TokenStore, sequence_length: int) -> Pieces:
    """Pieces that overlap by one token, so that each token of a document but its first is predicted exactly once.

    What predicts nothing is no piece: a document of one token, a stretch outside of an assistant's turns.
    """
    parts = [
        _split(store, at, min(at + _DOCUMENTS_AT_ONCE, store.documents), sequence_length)
        for at in range(0, store.documents, _DOCUMENTS_AT_ONCE)
    ]
    return Pieces(
        np.concatenate([part.start for part in parts]),
        np.concatenate([part.length for part in parts]),
        np.concatenate([part.predicted for part in parts]),
    )


def _split(store: TokenStore, first: int, stop: int, sequence_length: int) -> Pieces:
    offsets = np.asarray(store.offsets[first : stop + 1])
    counts = -(-(np.diff(offsets) - 1) // (sequence_length - 1))  # pieces of each document, 0 for one of one token
    document = np.repeat(np.arange(stop - first), counts)
    nth = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = offsets[document] + nth * (sequence_length - 1)
    length = np.minimum(sequence_length, offsets[document + 1] - start)
    if store.mask is None or len(start) == 0:
        return Pieces(start, length.astype(np.int32), (length - 1).astype(np.int32))
    # Labels of a piece are the tokens after its first: disjoint, ascending ranges, summed pairwise by reduceat.
    base, end = int(start[0]), int(start[-1] + length[-1])
    mask = np.append(store.mask[base:end], np.uint8(0))
    ranges = np.stack([start + 1, start + length], axis=1).ravel() - base
    predicted = np.add.reduceat(mask, ranges, dtype=np.int32)[::2]
    kept = predicted > 0
    return Pieces(start[kept], length[kept].astype(np.int32), predicted[kept])


def best_fit(histogram: Ints, sequence_length: int) -> Ints:
    """The sequence [P] of each piece, pieces in descending order of length; `histogram[n]` pieces have length n.

    Each length goes where it leaves the least room. Sequences with equal room are ranges of numbers, kept together.
    """
    rooms = _Rooms()
    rooms.add(sequence_length, 0, int(histogram.sum()))  # a sequence a piece is more than enough
    placements: list[tuple[int, int, int]] = []  # (first sequence, sequences, pieces in each)
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            room, first, stop = rooms.take(length)
            each = min(room // length, left)
            used = min(left // each, stop - first)
            placements.append((first, used, each))
            rooms.add(room - each * length, first, first + used)
            rooms.add(room, first + used, stop)
            left -= used * each
    firsts, useds, eachs = np.array(placements, np.int64).reshape(-1, 3).T
    placed = useds * eachs
    nth = np.arange(placed.sum()) - np.repeat(np.cumsum(placed) - placed, placed)
    sequence: Ints = np.repeat(firsts, placed) + nth // np.repeat(eachs, placed)
    return sequence


class _Rooms:
    """Ranges of sequences by the room that is left in each of them."""

    def __init__(self) -> None:
        self.ascending: list[int] = []
        self.ranges: dict[int, list[tuple[int, int]]] = {}

    def add(self, room: int, first: int, stop: int) -> None:
        if first == stop or room == 0:
            return
        if room not in self.ranges:
            insort(self.ascending, room)
            self.ranges[room] = []
        self.ranges[room].append((first, stop))

    def take(self, length: int) -> tuple[int, int, int]:
        """Remove and return (room, first, stop) of a range with the least room that `length` fits."""
        at = bisect_left(self.ascending, length)
        room = self.ascending[at]
        first, stop = self.ranges[room].pop()
        if not self.ranges[room]:
            del self.ranges[room]
            del self.ascending[at]
        return room, first, stop


@dataclass(frozen=True)
class Packing:
    """Which lengths share a sequence: the same in every epoch. A slot is a place for a piece, in descending length."""

    pieces: Pieces
    slots: npt.NDArray[Any]  # [P], sequence after sequence
    edges: Ints  # [S + 1]; sequence s has slots[edges[s] : edges[s + 1]]
    tokens: Ints  # [S], real tokens
    kept_in: Path | None  # where its epochs are kept, too; None: in memory

    @classmethod
    def of(cls, store: TokenStore, sequence_length: int, packing: bool) -> Packing:
        """Raises UserError where no piece predicts anything. `packing` false: each piece is a sequence of its own."""
        most = store.documents + int(store.offsets[-1]) // sequence_length
        kept_in = store.path if most > MAPPED_PIECES else None
        name = f"{'packed' if packing else 'apart'}-{sequence_length}"
        found = _kept(kept_in, name, lambda: _packed(store, sequence_length, packing))
        pieces = Pieces(found["start"], found["length"], found["predicted"])
        within = None if kept_in is None else kept_in / name
        return cls(pieces, found["slots"], found["edges"], found["tokens"], within)

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """The sequences of `epoch`, shuffled by (seed, epoch)."""
        return self._filled(
            f"epoch-{seed}-{epoch}",
            lambda: (shuffled(len(self.slots), seed, 2 * epoch), shuffled(self.sequences, seed, 2 * epoch + 1)),
        )

    def in_order(self) -> Epoch:
        """The sequences without a shuffle."""
        return self._filled("in-order", lambda: (np.arange(len(self.slots)), np.arange(self.sequences)))

    def _filled(self, name: str, orders: Callable[[], tuple[Ints, Ints]]) -> Epoch:
        """`orders`: of the pieces, and of the sequences."""
        found = _kept(self.kept_in, name, lambda: self._fill(*orders()), most=("epoch-*", _KEPT_EPOCHS))
        return Epoch(self, found["piece"], found["order"], found["predicted"], found["tokens"])

    def _fill(self, order: Ints, sequences: Ints) -> Arrays:
        shortfall = self.pieces.length.max() - self.pieces.length[order]
        if shortfall.max() < 1 << 16:
            shortfall = shortfall.astype(np.uint16)  # for which a stable sort is a radix sort
        by_slot = order[np.argsort(shortfall, kind="stable")]
        piece = by_slot[self.slots].astype(_index_dtype(len(order)))
        predicted = np.add.reduceat(self.pieces.predicted[piece], self.edges[:-1], dtype=np.int64)
        return {
            "piece": piece,
            "order": sequences,
            "predicted": predicted[sequences],
            "tokens": self.tokens[sequences],
        }


def _packed(store: TokenStore, sequence_length: int, packing: bool) -> Arrays:
    """All arrays of a `Packing`. Raises UserError where no piece predicts anything."""
    pieces = split(store, sequence_length)
    if len(pieces.start) == 0:
        raise DataError("no usable document: none has a token to learn from", store.path)
    histogram = np.bincount(pieces.length, minlength=sequence_length + 1)
    sequence = best_fit(histogram, sequence_length) if packing else np.arange(len(pieces.start))
    slots = np.argsort(sequence, kind="stable").astype(_index_dtype(len(sequence)))
    edges = np.concatenate([[0], np.cumsum(np.bincount(sequence))])
    lengths = np.repeat(np.arange(sequence_length, -1, -1), histogram[::-1])  # of each slot
    tokens = np.add.reduceat(lengths[slots], edges[:-1])
    return {**vars(pieces), "slots": slots, "edges": edges, "tokens": tokens}


def _kept(
    directory: Path | None, name: str, build: Callable[[], Arrays], most: tuple[str, int] | None = None
) -> Arrays:
    return build() if directory is None else kept_arrays(directory / name, build, most)


@dataclass(frozen=True)
class Epoch:
    """All pieces once, in S sequences."""

    packing: Packing
    piece: npt.NDArray[Any]  # [P], in the order of packing.edges
    order: Ints  # [S]: the i-th sequence of the epoch is packing's sequence order[i]
    predicted: Ints  # [S], labels of the i-th sequence
    tokens: Ints  # [S], real tokens of the i-th sequence

    def sequence(self, index: int) -> list[tuple[int, int]]:
        """(start, length) in the store of each piece of the `index`-th sequence."""
        piece, pieces = self._piece(index), self.packing.pieces
        return list(zip(pieces.start[piece].tolist(), pieces.length[piece].tolist(), strict=True))

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Of the pieces of the `index`-th sequence."""
        lengths: npt.NDArray[np.int32] = self.packing.pieces.length[self._piece(index)]
        return lengths

    def _piece(self, index: int) -> npt.NDArray[Any]:
        at = self.order[index]
        return self.piece[self.packing.edges[at] : self.packing.edges[at + 1]]


def shuffled(count: int, seed: int, stream: int) -> Ints:
    """A permutation of `count` that depends on (seed, stream) alone: numpy promises that this stream never changes."""
    keys = np.random.Philox(key=np.array([seed % 2**64, stream], np.uint64)).random_raw(count)
    return np.argsort(keys, kind="stable")


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count < 2**31 else np.int64)
