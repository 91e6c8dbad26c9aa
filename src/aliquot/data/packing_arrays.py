"""Compute the arrays of a packing: documents become pieces, and best-fit decreasing packs pieces into sequences.

All pieces of one length are placed in a few range operations, so that the work grows with the number of different
lengths and not with the number of pieces. Arrays are filled `at_once` elements at a time with counting sorts, so that
private memory grows with the number of different lengths and not with the number of pieces or sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import DataError
from aliquot.data.disk_arrays import AT_ONCE, Array, Cursors, NewArrays
from aliquot.data.token_store import TokenStore

Ints = npt.NDArray[np.int64]

_MASK_AT_ONCE = 1 << 22  # tokens whose mask is summed, for which it is widened to int32


@dataclass(frozen=True)
class Pieces:
    """P runs of tokens of a store, in its order. `predicted` counts the tokens of a piece that are labels in it."""

    start: Ints  # [P], index of the first token in the store
    length: npt.NDArray[np.int32]  # [P], 2 .. sequence_length
    predicted: npt.NDArray[np.int32]  # [P], >= 1


def split(store: TokenStore, sequence_length: int, at_once: int = AT_ONCE) -> Iterator[Pieces]:
    """Pieces that overlap by one token, so that each token of a document but its first is predicted exactly once; at
    most `at_once` of them at a time.

    What predicts nothing is no piece: a document of one token, a stretch outside of an assistant's turns.
    """
    size = at_once if store.mask is None else max(1, min(at_once, _MASK_AT_ONCE // sequence_length))
    for first in range(0, store.documents, at_once):
        offsets = np.asarray(store.offsets[first : first + at_once + 1])
        counts = -(-(np.diff(offsets) - 1) // (sequence_length - 1))  # pieces of each document, 0 for one of one token
        stops = np.cumsum(counts)
        for start in range(0, int(stops[-1]), size):
            stop = min(start + size, int(stops[-1]))
            low, high = np.searchsorted(stops, [start, stop - 1], side="right").tolist()
            here = np.minimum(stops[low : high + 1], stop) - np.maximum((stops - counts)[low : high + 1], start)
            document = np.repeat(np.arange(low, high + 1), here)
            nth = np.arange(start, stop) - (stops - counts)[document]
            begin = offsets[document] + nth * (sequence_length - 1)
            yield _counted(store, begin, np.minimum(sequence_length, offsets[document + 1] - begin))


def _counted(store: TokenStore, start: Ints, length: Ints) -> Pieces:
    """What is left of pieces that follow each other once their labels are counted."""
    if store.mask is None:
        return Pieces(start, length.astype(np.int32), (length - 1).astype(np.int32))
    # Labels of a piece are the tokens after its first: disjoint, ascending ranges, summed pairwise by reduceat.
    base, end = int(start[0]), int(start[-1] + length[-1])
    mask = np.append(store.mask[base:end], np.uint8(0))
    ranges = np.stack([start + 1, start + length], axis=1).ravel() - base
    predicted = np.add.reduceat(mask, ranges, dtype=np.int32)[::2]
    kept = predicted > 0
    return Pieces(start[kept], length[kept].astype(np.int32), predicted[kept])


class Placement(NamedTuple):
    """`each` pieces of `length` go to every one of the sequences [first, stop)."""

    first: int
    stop: int
    each: int
    length: int


def best_fit(histogram: Ints, sequence_length: int) -> list[Placement]:
    """Placements of all pieces, in descending order of length; `histogram[n]` pieces have length n.

    Each length goes where it leaves the least room. Sequences with equal room are ranges of numbers, kept together.
    """
    rooms = _Rooms()
    rooms.add(sequence_length, 0, int(histogram.sum()))  # a sequence a piece is more than enough
    placements: list[Placement] = []
    for length in np.flatnonzero(histogram)[::-1].tolist():
        left = int(histogram[length])
        while left:
            room, first, stop = rooms.take(length)
            each = min(room // length, left)
            used = min(left // each, stop - first)
            placements.append(Placement(first, first + used, each, length))
            rooms.add(room - each * length, first, first + used)
            rooms.add(room, first + used, stop)
            left -= used * each
    return placements


def one_each(histogram: Ints) -> list[Placement]:
    """A sequence for every piece, in descending order of length."""
    lengths = np.flatnonzero(histogram)[::-1]
    stops = np.cumsum(histogram[lengths]).tolist()
    firsts = [0, *stops[:-1]]
    return [Placement(*place) for place in zip(firsts, stops, [1] * len(stops), lengths.tolist(), strict=True)]


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


Order = Callable[[Array, NewArrays, int], None]  # fills an array [n] with a permutation of n, so many at once


@dataclass(frozen=True)
class PackingArrays:
    """A packing of P pieces into S sequences, as flat arrays."""

    pieces: Pieces
    slots: npt.NDArray[Any]  # [P], slots of pieces, sequence after sequence
    edges: Ints  # [S + 1]; sequence s has slots[edges[s] : edges[s + 1]]
    tokens: Ints  # [S], tokens of each sequence, without padding


def fill_packing(
    new: NewArrays, store: TokenStore, sequence_length: int, packing: bool, at_once: int = AT_ONCE
) -> None:
    """All arrays of a `Packing`. Raises UserError where no piece predicts anything."""
    histogram = np.zeros(sequence_length + 1, np.int64)
    for some in split(store, sequence_length, at_once):
        histogram += np.bincount(some.length, minlength=len(histogram))
    count = int(histogram.sum())
    if count == 0:
        raise DataError("no usable document: none has a token to learn from", store.path)
    begins = new.keep("start", count, np.int64)
    lengths, predicted = (new.keep(name, count, np.int32) for name in ("length", "predicted"))
    at = 0
    for some in split(store, sequence_length, at_once):
        these = slice(at, at + len(some.start))
        begins[these], lengths[these], predicted[these] = some.start, some.length, some.predicted
        at = these.stop
    _fill_slots(new, best_fit(histogram, sequence_length) if packing else one_each(histogram), count, at_once)


def _fill_slots(new: NewArrays, placements: list[Placement], count: int, at_once: int) -> None:
    """The slots [count] of every sequence, which are numbered in the order in which they are placed."""
    sequences = max(placement.stop for placement in placements)
    slots, tokens = new.keep("slots", count, _index_dtype(count)), new.keep("tokens", sequences, np.int64)
    edges = new.keep("edges", sequences + 1, np.int64)
    for first, stop, each, length in placements:
        edges[first + 2 : stop + 2] += each  # how many the sequence before has
        tokens[first:stop] += each * length
    for start in range(1, len(edges), at_once):
        some = edges[start : start + at_once]
        some[:] = edges[start - 1] + np.cumsum(some)
    places = edges[1:]  # the next of each sequence: where it begins, and once all are placed where it ends
    slot = 0
    for first, stop, each, _ in placements:
        size = max(1, at_once // each)
        for start in range(first, stop, size):
            some = places[start : min(start + size, stop)]
            here = len(some) * each
            slots[(some[:, None] + np.arange(each)).ravel()] = np.arange(slot, slot + here)
            some += each
            slot += here


def fill_epoch(
    new: NewArrays, packing: PackingArrays, order_pieces: Order, order_sequences: Order, at_once: int = AT_ONCE
) -> None:
    """All arrays of an `Epoch`: of the pieces of one length the first in their order has the first slot."""
    lengths, labels = map(np.asarray, (packing.pieces.length, packing.pieces.predicted))
    slots, edges, tokens = map(np.asarray, (packing.slots, packing.edges, packing.tokens))
    piece = new.keep("piece", len(slots), _index_dtype(len(slots)))
    order_pieces(piece, new, at_once)  # here for now
    by_slot = new.scratch(len(slots), piece.dtype)
    _by_descending_length(by_slot, lengths, piece, at_once)
    of_packing = new.scratch(len(tokens), np.int64)  # labels of its sequences
    for low, high in _runs(edges, at_once):
        start, stop = int(edges[low]), int(edges[high])
        these = by_slot[slots[start:stop]]
        piece[start:stop] = these
        of_packing[low:high] = np.add.reduceat(labels[these], edges[low:high] - start, dtype=np.int64)
    order, kept_tokens = new.keep("order", len(tokens), np.int64), new.keep("tokens", len(tokens), np.int64)
    predicted = new.keep("predicted", len(tokens), np.int64)
    order_sequences(order, new, at_once)
    for start in range(0, len(order), at_once):
        some = slice(start, start + at_once)
        predicted[some], kept_tokens[some] = of_packing[order[some]], tokens[order[some]]


def _by_descending_length(out: Array, lengths: npt.NDArray[np.int32], order: Array, at_once: int) -> None:
    """Fill `out` [P] with the pieces of `order` [P]; those of one length stay in it."""
    longest = int(lengths.max())
    dtype = np.uint16 if longest < 1 << 16 else np.int32  # a stable sort of the first is a radix sort
    counts = np.zeros(longest + 1, np.int64)
    for start in range(0, len(lengths), at_once):
        counts += np.bincount(longest - lengths[start : start + at_once], minlength=len(counts))
    cursors = Cursors(counts)
    for start in range(0, len(order), at_once):
        some = order[start : start + at_once]
        places, each = cursors.places((longest - lengths[some]).astype(dtype))
        out[places] = some[each]


def _runs(edges: Ints, at_once: int) -> Iterator[tuple[int, int]]:
    """Sequences [low, high) that follow each other and have at most `at_once` pieces, or one sequence."""
    low = 0
    while low < len(edges) - 1:
        fit = np.searchsorted(edges, edges[low] + at_once, side="right")
        high = max(low + 1, int(fit) - 1)
        yield low, high
        low = high


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count < 2**31 else np.int64)
