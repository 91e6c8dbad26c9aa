"""Cut documents into pieces, and pack the pieces into sequences.

A packing decides once which lengths of pieces share a sequence. Each epoch then shuffles the pieces of equal length,
and the order of the sequences. Every epoch therefore has the same number of sequences, so that the position of a step
in the data can be computed without building earlier epochs. A pair of answers is one piece, which is never cut, and so
is a rated answer.

All pieces of one length are placed by a few placements, each for a range of sequences. The pieces of a sequence are
looked up in the placements. Flat arrays are filled by counting sorts, `at_once` elements at a time. The Python work and
the private memory therefore grow with the number of different lengths, not with the number of pieces or sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import DataError
from aliquot.data.disk_arrays import (
    AT_ONCE,
    Array,
    Cursors,
    Ints,
    NewArrays,
    ascending,
    cached_arrays,
    shuffle,
)
from aliquot.data.token_store import TokenStore
from aliquot.data.workload import MAPPED_PIECES

Order = Callable[[Array, NewArrays, int], None]  # fills an array [n] with a permutation of 0 .. n - 1

_CACHED_EPOCHS = 4  # epochs of a packing that stay on disk: enough for two runs that need two epochs each
_MASK_AT_ONCE = 1 << 22  # tokens whose mask is read at once to count labels


@dataclass(frozen=True)
class Pieces:
    """P pieces of documents, in the order of the token store. Each piece is a contiguous run of tokens."""

    start: Ints  # [P], index of the first token in the store
    length: npt.NDArray[np.int32]  # [P], 2 .. sequence_length
    # [P], number of labels, >= 1; 1 for a pair or a rated answer: the loss is averaged over this number.
    predicted: npt.NDArray[np.int32]


@dataclass(frozen=True)
class Packing:
    """The assignment of P slots to S sequences, the same in every epoch.

    A slot takes one piece of a fixed length. Slots are numbered in the order of the placements, which is the descending
    order of length, and within a placement in the order of the sequences.
    """

    pieces: Pieces
    placements: Ints  # [4, placements]; the rows are the fields of `Placement`
    epoch_cache: Path | None  # directory for the arrays of epochs; None: in private memory
    middles: Ints | None = None  # [pairs of the store], first token of the second answer of each pair, ascending

    @classmethod
    def of(cls, store: TokenStore, sequence_length: int, packing: bool) -> Packing:
        """Pack the pieces of a token store; without `packing`, each piece is a sequence of its own.

        Raises UserError if no token of the store is a label.
        """
        max_pieces = store.documents + int(store.offsets[-1]) // (sequence_length - 1)
        middles = store.offsets[1::2] if store.pairs else None
        name = f"{'packed' if packing else 'apart'}-{sequence_length}"
        if store.pairs and store.positions is not None and store.positions < sequence_length:
            name += f"-{store.positions}"
        directory = store.path / name if max_pieces > MAPPED_PIECES else None
        arrays = cached_arrays(directory, lambda new: fill_packing(new, store, sequence_length, packing))
        pieces = Pieces(arrays["start"], arrays["length"], arrays["predicted"])
        return cls(pieces, np.array(arrays["placements"]).reshape(4, -1), directory, middles)

    @cached_property
    def sequences(self) -> int:
        return int(self.placements[1].max())

    @cached_property
    def tokens(self) -> int:
        """The number of tokens of all sequences, without padding."""
        return int(self.pieces.length.sum(dtype=np.int64))

    @cached_property
    def labels(self) -> int:
        """The number of labels of all sequences."""
        return int(self.pieces.predicted.sum(dtype=np.int64))

    @cached_property
    def _first_slots(self) -> Ints:
        """The first slot of each placement."""
        first, stop, per_sequence, _ = self.placements
        counts: Ints = (stop - first) * per_sequence
        return np.cumsum(counts) - counts

    def slots(self, sequence: int) -> Ints:
        """Return the slots of a sequence, in ascending order."""
        first, stop, per_sequence, _ = self.placements
        at = np.flatnonzero((first <= sequence) & (sequence < stop))
        counts = per_sequence[at]
        starts = self._first_slots[at] + (sequence - first[at]) * counts
        return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """Return the sequences of `epoch`; (seed, epoch) determines the shuffle."""
        shuffles = partial(shuffle, seed=seed, stream=2 * epoch), partial(shuffle, seed=seed, stream=2 * epoch + 1)
        return self._filled(f"epoch-{seed}-{epoch}", lambda new: fill_epoch(new, self, *shuffles))

    def in_order(self) -> Epoch:
        """Return the sequences in a fixed order, without a shuffle."""
        return self._filled("in-order", lambda new: fill_epoch(new, self, ascending, ascending))

    def _filled(self, name: str, fill: Callable[[NewArrays], None]) -> Epoch:
        directory = None if self.epoch_cache is None else self.epoch_cache / name
        arrays = cached_arrays(directory, fill, most=("epoch-*", _CACHED_EPOCHS))
        return Epoch(self, arrays["piece"], arrays["order"])


@dataclass(frozen=True)
class Epoch:
    """The S sequences of one epoch, which contain each piece once."""

    packing: Packing
    piece: npt.NDArray[Any]  # [P], index of the piece in each slot
    order: Ints  # [S]; the i-th sequence of the epoch is sequence order[i] of the packing

    def sequence(self, index: int) -> list[tuple[int, int]]:
        """Return (start, length) in the token store of each piece of the `index`-th sequence; of pairs, both halves."""
        piece, pieces, middles = self._piece(index), self.packing.pieces, self.packing.middles
        start, length = pieces.start[piece], pieces.length[piece]
        if middles is not None:
            middle = middles[np.searchsorted(middles, start, side="right")]
            length = np.stack([middle - start, start + length - middle], axis=1).ravel()
            start = np.stack([start, middle], axis=1).ravel()
        return list(zip(start.tolist(), length.tolist(), strict=True))

    def counts(self, index: int) -> tuple[int, int]:
        """Return the numbers of (labels, tokens without padding) in the `index`-th sequence."""
        piece, pieces = self._piece(index), self.packing.pieces
        return int(pieces.predicted[piece].sum()), int(pieces.length[piece].sum())

    def _piece(self, index: int) -> npt.NDArray[Any]:
        return self.piece[self.packing.slots(self.order[index])]


def split(store: TokenStore, sequence_length: int, at_once: int = AT_ONCE) -> Iterator[Pieces]:
    """Cut documents into pieces of at most `sequence_length` tokens, and yield at most `at_once` pieces at a time.

    Consecutive pieces of a document overlap by one token, so that each token except the document's first is a label
    exactly once. Pieces without labels are dropped: a document of one token, or text outside the assistant's turns. A
    pair of answers and a rated answer are not cut: longer ones are dropped.
    """
    size = at_once if store.mask is None else max(1, min(at_once, _MASK_AT_ONCE // sequence_length))
    unit_offsets = store.unit_offsets
    for first in range(0, len(unit_offsets) - 1, at_once):
        offsets = np.asarray(unit_offsets[first : first + at_once + 1])
        # Number of pieces of each document; 0 for a document of one token.
        counts = -(-(np.diff(offsets) - 1) // (sequence_length - 1))
        if store.keeps_whole:
            counts = np.where(store.too_long(sequence_length, first, first + len(counts)), 0, 1)
        stops = np.cumsum(counts)
        for start in range(0, int(stops[-1]), size):
            stop = min(start + size, int(stops[-1]))
            low, high = np.searchsorted(stops, [start, stop - 1], side="right").tolist()
            pieces_here = np.minimum(stops[low : high + 1], stop) - np.maximum((stops - counts)[low : high + 1], start)
            document = np.repeat(np.arange(low, high + 1), pieces_here)
            nth = np.arange(start, stop) - (stops - counts)[document]
            begin = offsets[document] + nth * (sequence_length - 1)
            yield _counted(store, begin, np.minimum(sequence_length, offsets[document + 1] - begin))


def _counted(store: TokenStore, start: Ints, length: Ints) -> Pieces:
    """Count the labels of consecutive pieces, and drop pieces without labels."""
    if store.keeps_whole:
        return Pieces(start, length.astype(np.int32), np.ones(len(start), np.int32))
    if store.mask is None:
        return Pieces(start, length.astype(np.int32), (length - 1).astype(np.int32))
    # The labels of a piece are all its tokens except the first: disjoint, ascending ranges, as reduceat needs.
    base, end = int(start[0]), int(start[-1] + length[-1])
    mask = np.append(store.mask[base:end], np.uint8(0))
    ranges = np.stack([start + 1, start + length], axis=1).ravel() - base
    predicted = np.add.reduceat(mask, ranges, dtype=np.int32)[::2]
    has_labels = predicted > 0
    return Pieces(start[has_labels], length[has_labels].astype(np.int32), predicted[has_labels])


class Placement(NamedTuple):
    """A decision of the packing: `per_sequence` pieces of `length` go to each of the sequences [first, stop)."""

    first: int
    stop: int
    per_sequence: int
    length: int


def best_fit(histogram: Ints, sequence_length: int, packing: bool = True) -> list[Placement]:
    """Place all pieces by best-fit decreasing, and return the placements in descending order of length.

    Each piece goes to the sequence in which the least free space remains; without `packing`, to a sequence of its own.
    Sequences with equal free space are handled as ranges of sequence numbers. `histogram[n]`: the number of pieces of
    length n.
    """
    rooms = _Rooms()
    rooms.add(sequence_length, 0, int(histogram.sum()))  # one sequence for each piece always suffices
    placements: list[Placement] = []
    for length in np.flatnonzero(histogram)[::-1].tolist():
        remaining = int(histogram[length])
        while remaining:
            room, first, stop = rooms.take(length)
            per_sequence = min(room // length, remaining) if packing else 1
            sequences = min(remaining // per_sequence, stop - first)
            placements.append(Placement(first, first + sequences, per_sequence, length))
            rooms.add(room - per_sequence * length if packing else 0, first, first + sequences)
            rooms.add(room, first + sequences, stop)
            remaining -= sequences * per_sequence
    return placements


@dataclass
class _Rooms:
    """Ranges of sequence numbers, sorted by the free space (`room`, in tokens) in each sequence of a range."""

    ascending: list[int] = field(default_factory=list)
    ranges: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, room: int, first: int, stop: int) -> None:
        if first == stop or room == 0:
            return
        if room not in self.ranges:
            insort(self.ascending, room)
            self.ranges[room] = []
        self.ranges[room].append((first, stop))

    def take(self, length: int) -> tuple[int, int, int]:
        """Remove and return a range (room, first, stop) with the least room for a piece of `length`."""
        at = bisect_left(self.ascending, length)
        room = self.ascending[at]
        first, stop = self.ranges[room].pop()
        if not self.ranges[room]:
            del self.ranges[room]
            del self.ascending[at]
        return room, first, stop


def fill_packing(
    new: NewArrays, store: TokenStore, sequence_length: int, packing: bool, at_once: int = AT_ONCE
) -> None:
    """Compute the arrays of a `Packing`. Raises UserError if no piece has a label."""
    histogram = np.zeros(sequence_length + 1, np.int64)
    for part in split(store, sequence_length, at_once):
        histogram += np.bincount(part.length, minlength=len(histogram))
    count = int(histogram.sum())
    if count == 0:
        raise DataError(store.why_unusable(sequence_length), store.label)
    starts = new.keep("start", count, np.int64)
    lengths, predicted = (new.keep(name, count, np.int32) for name in ("length", "predicted"))
    at = 0
    for part in split(store, sequence_length, at_once):
        span = slice(at, at + len(part.start))
        starts[span], lengths[span], predicted[span] = part.start, part.length, part.predicted
        at = span.stop
    placements = best_fit(histogram, sequence_length, packing)
    new.keep("placements", 4 * len(placements), np.int64)[:] = np.array(placements).T.ravel()


def fill_epoch(
    new: NewArrays, packing: Packing, order_pieces: Order, order_sequences: Order, at_once: int = AT_ONCE
) -> None:
    """Compute the arrays of an `Epoch`.

    `order_pieces` fills an array with an order of all pieces, in which pieces of equal length take their slots.
    `order_sequences` fills an array with the order of the sequences.
    """
    count = len(packing.pieces.length)
    piece = new.keep("piece", count, np.int32 if count < 2**31 else np.int64)
    order = new.scratch(count, piece.dtype)
    order_pieces(order, new, at_once)
    _sort_by_length(piece, np.asarray(packing.pieces.length), order, at_once)
    order_sequences(new.keep("order", packing.sequences, np.int64), new, at_once)


def _sort_by_length(out: Array, lengths: npt.NDArray[np.int32], order: Array, at_once: int) -> None:
    """Fill `out` [P] with the pieces in `order` [P], stably sorted by descending length."""
    longest = int(lengths.max())
    dtype = np.uint16 if longest < 1 << 16 else np.int32  # numpy uses a radix sort for uint16
    counts = np.zeros(longest + 1, np.int64)
    for start in range(0, len(lengths), at_once):
        counts += np.bincount(longest - lengths[start : start + at_once], minlength=len(counts))
    cursors = Cursors(counts)
    for start in range(0, len(order), at_once):
        part = order[start : start + at_once]
        places, arrival = cursors.places((longest - lengths[part]).astype(dtype))
        out[places] = part[arrival]
