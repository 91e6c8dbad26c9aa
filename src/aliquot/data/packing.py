"""Cut documents into pieces and pack pieces into sequences, all as flat arrays.

A packing fixes which lengths share a sequence. Each epoch shuffles which pieces of these lengths share a sequence, and
the order of sequences. Every epoch therefore has the same number of sequences, and the place of a step in the data
follows without a look at earlier epochs.

All pieces of one length are placed in a few range operations, and arrays are filled `at_once` elements at a time with
counting sorts. Work and private memory therefore grow with the number of different lengths, not with the number of
pieces or sequences.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import DataError
from aliquot.data.disk_arrays import (
    AT_ONCE,
    Array,
    Arrays,
    Cursors,
    NewArrays,
    ascending,
    cached_arrays,
    memory_arrays,
    shuffle,
)
from aliquot.data.token_store import TokenStore
from aliquot.data.workload import MAPPED_PIECES

Ints = npt.NDArray[np.int64]
Order = Callable[[Array, NewArrays, int], None]  # fills an array [n] with a permutation of n

_CACHED_EPOCHS = 4  # epochs of a packing on disk: two runs with two epochs each
_MASK_AT_ONCE = 1 << 22  # tokens whose mask is summed at once, as int32


@dataclass(frozen=True)
class Pieces:
    """P runs of tokens of a store, in its order. `predicted` counts the labels of each piece."""

    start: Ints  # [P], index of the first token in the store
    length: npt.NDArray[np.int32]  # [P], 2 .. sequence_length
    predicted: npt.NDArray[np.int32]  # [P], >= 1


@dataclass(frozen=True)
class Packing:
    """Which lengths share a sequence, alike in every epoch. A slot is a place for a piece; slots descend in length."""

    pieces: Pieces
    slots: npt.NDArray[Any]  # [P], slots of pieces, sequence after sequence
    edges: Ints  # [S + 1]; sequence s has slots[edges[s] : edges[s + 1]]
    tokens: Ints  # [S], tokens without padding
    epoch_cache: Path | None  # directory for arrays of epochs; None: memory

    @classmethod
    def of(cls, store: TokenStore, sequence_length: int, packing: bool) -> Packing:
        """Pack the pieces of a store; without `packing` each piece is a sequence.

        Raises UserError if there is no label.
        """
        max_pieces = store.documents + int(store.offsets[-1]) // (sequence_length - 1)
        cache = store.path if max_pieces > MAPPED_PIECES else None
        name = f"{'packed' if packing else 'apart'}-{sequence_length}"
        arrays = _arrays_of(cache, name, lambda new: fill_packing(new, store, sequence_length, packing))
        pieces = Pieces(arrays["start"], arrays["length"], arrays["predicted"])
        directory = None if cache is None else cache / name
        return cls(pieces, arrays["slots"], arrays["edges"], arrays["tokens"], directory)

    @property
    def sequences(self) -> int:
        return len(self.tokens)

    def epoch(self, seed: int, epoch: int) -> Epoch:
        """Return the sequences of `epoch`, shuffled by (seed, epoch)."""
        shuffles = partial(shuffle, seed=seed, stream=2 * epoch), partial(shuffle, seed=seed, stream=2 * epoch + 1)
        return self._filled(f"epoch-{seed}-{epoch}", lambda new: fill_epoch(new, self, *shuffles))

    def in_order(self) -> Epoch:
        """Return the sequences without a shuffle."""
        return self._filled("in-order", lambda new: fill_epoch(new, self, ascending, ascending))

    def _filled(self, name: str, fill: Callable[[NewArrays], None]) -> Epoch:
        arrays = _arrays_of(self.epoch_cache, name, fill, most=("epoch-*", _CACHED_EPOCHS))
        return Epoch(self, arrays["piece"], arrays["order"], arrays["predicted"], arrays["tokens"])


def _arrays_of(
    directory: Path | None, name: str, fill: Callable[[NewArrays], None], most: tuple[str, int] | None = None
) -> Arrays:
    return memory_arrays(fill) if directory is None else cached_arrays(directory / name, fill, most)


@dataclass(frozen=True)
class Epoch:
    """All pieces once, in S sequences."""

    packing: Packing
    piece: npt.NDArray[Any]  # [P], in the order of packing.edges
    order: Ints  # [S]: the i-th sequence of the epoch is packing's sequence order[i]
    predicted: Ints  # [S], labels of the i-th sequence
    tokens: Ints  # [S], tokens of the i-th sequence, without padding

    def sequence(self, index: int) -> list[tuple[int, int]]:
        """Return (start, length) in the store of each piece of the `index`-th sequence."""
        piece, pieces = self._piece(index), self.packing.pieces
        return list(zip(pieces.start[piece].tolist(), pieces.length[piece].tolist(), strict=True))

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        """Return the lengths of the pieces of the `index`-th sequence."""
        lengths: npt.NDArray[np.int32] = self.packing.pieces.length[self._piece(index)]
        return lengths

    def _piece(self, index: int) -> npt.NDArray[Any]:
        at = self.order[index]
        return self.piece[self.packing.edges[at] : self.packing.edges[at + 1]]


def split(store: TokenStore, sequence_length: int, at_once: int = AT_ONCE) -> Iterator[Pieces]:
    """Yield pieces of documents, at most `at_once` at a time.

    Pieces overlap by one token, so that each token of a document but the first is predicted exactly once. A run without
    labels is no piece: a document of one token, or a stretch outside of the assistant's turns.
    """
    size = at_once if store.mask is None else max(1, min(at_once, _MASK_AT_ONCE // sequence_length))
    for first in range(0, store.documents, at_once):
        offsets = np.asarray(store.offsets[first : first + at_once + 1])
        # Pieces of each document; 0 for a document of one token.
        counts = -(-(np.diff(offsets) - 1) // (sequence_length - 1))
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
    """Count the labels of pieces that follow each other, and drop pieces without labels."""
    if store.mask is None:
        return Pieces(start, length.astype(np.int32), (length - 1).astype(np.int32))
    # The labels of a piece are its tokens but the first: disjoint, ascending ranges, which reduceat sums.
    base, end = int(start[0]), int(start[-1] + length[-1])
    mask = np.append(store.mask[base:end], np.uint8(0))
    ranges = np.stack([start + 1, start + length], axis=1).ravel() - base
    predicted = np.add.reduceat(mask, ranges, dtype=np.int32)[::2]
    has_labels = predicted > 0
    return Pieces(start[has_labels], length[has_labels].astype(np.int32), predicted[has_labels])


class Placement(NamedTuple):
    """`per_sequence` pieces of `length` go to each of the sequences [first, stop)."""

    first: int
    stop: int
    per_sequence: int
    length: int


def best_fit(histogram: Ints, sequence_length: int) -> list[Placement]:
    """Return placements of all pieces, in descending order of length; `histogram[n]` pieces have length n.

    Each piece goes to a sequence in which it leaves the least room. Sequences with equal room form ranges of numbers.
    """
    rooms = _Rooms()
    rooms.add(sequence_length, 0, int(histogram.sum()))  # one sequence for each piece always suffices
    placements: list[Placement] = []
    for length in np.flatnonzero(histogram)[::-1].tolist():
        remaining = int(histogram[length])
        while remaining:
            room, first, stop = rooms.take(length)
            per_sequence = min(room // length, remaining)
            sequences = min(remaining // per_sequence, stop - first)
            placements.append(Placement(first, first + sequences, per_sequence, length))
            rooms.add(room - per_sequence * length, first, first + sequences)
            rooms.add(room, first + sequences, stop)
            remaining -= sequences * per_sequence
    return placements


def one_per_sequence(histogram: Ints) -> list[Placement]:
    """Return placements with one piece per sequence, in descending order of length."""
    lengths = np.flatnonzero(histogram)[::-1]
    stops = np.cumsum(histogram[lengths]).tolist()
    firsts = [0, *stops[:-1]]
    return [Placement(*place) for place in zip(firsts, stops, [1] * len(stops), lengths.tolist(), strict=True)]


class _Rooms:
    """Ranges of sequences by the room that is left in a sequence."""

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


def fill_packing(
    new: NewArrays, store: TokenStore, sequence_length: int, packing: bool, at_once: int = AT_ONCE
) -> None:
    """Fill all arrays of a `Packing`. Raises UserError if no piece has a label."""
    histogram = np.zeros(sequence_length + 1, np.int64)
    for part in split(store, sequence_length, at_once):
        histogram += np.bincount(part.length, minlength=len(histogram))
    count = int(histogram.sum())
    if count == 0:
        raise DataError("no usable document: none has a token to learn from", store.path)
    starts = new.keep("start", count, np.int64)
    lengths, predicted = (new.keep(name, count, np.int32) for name in ("length", "predicted"))
    at = 0
    for part in split(store, sequence_length, at_once):
        span = slice(at, at + len(part.start))
        starts[span], lengths[span], predicted[span] = part.start, part.length, part.predicted
        at = span.stop
    _fill_slots(new, best_fit(histogram, sequence_length) if packing else one_per_sequence(histogram), count, at_once)


def _fill_slots(new: NewArrays, placements: list[Placement], count: int, at_once: int) -> None:
    """Fill the slots [count] of all sequences. Slots are numbered in the order of placements."""
    sequences = max(placement.stop for placement in placements)
    slots, tokens = new.keep("slots", count, _index_dtype(count)), new.keep("tokens", sequences, np.int64)
    edges = new.keep("edges", sequences + 1, np.int64)
    for first, stop, per_sequence, length in placements:
        edges[first + 2 : stop + 2] += per_sequence  # the number of slots of the sequence before
        tokens[first:stop] += per_sequence * length
    for start in range(1, len(edges), at_once):
        part = edges[start : start + at_once]
        part[:] = edges[start - 1] + np.cumsum(part)
    places = edges[1:]  # the next free place of each sequence; at the end, the end of the sequence
    slot = 0
    for first, stop, per_sequence, _ in placements:
        size = max(1, at_once // per_sequence)
        for start in range(first, stop, size):
            part = places[start : min(start + size, stop)]
            count_here = len(part) * per_sequence
            slots[(part[:, None] + np.arange(per_sequence)).ravel()] = np.arange(slot, slot + count_here)
            part += per_sequence
            slot += count_here


def fill_epoch(
    new: NewArrays, packing: Packing, order_pieces: Order, order_sequences: Order, at_once: int = AT_ONCE
) -> None:
    """Fill all arrays of an `Epoch`: among pieces of one length, the first in their order takes the first slot."""
    lengths, labels = map(np.asarray, (packing.pieces.length, packing.pieces.predicted))
    slots, edges, tokens = map(np.asarray, (packing.slots, packing.edges, packing.tokens))
    piece = new.keep("piece", len(slots), _index_dtype(len(slots)))
    order_pieces(piece, new, at_once)  # a temporary order, replaced below
    piece_of_slot = new.scratch(len(slots), piece.dtype)
    _sort_by_length(piece_of_slot, lengths, piece, at_once)
    labels_of_sequence = new.scratch(len(tokens), np.int64)  # labels of the sequences of the packing
    for low, high in _runs(edges, at_once):
        start, stop = int(edges[low]), int(edges[high])
        pieces_here = piece_of_slot[slots[start:stop]]
        piece[start:stop] = pieces_here
        labels_of_sequence[low:high] = np.add.reduceat(labels[pieces_here], edges[low:high] - start, dtype=np.int64)
    order, epoch_tokens = new.keep("order", len(tokens), np.int64), new.keep("tokens", len(tokens), np.int64)
    predicted = new.keep("predicted", len(tokens), np.int64)
    order_sequences(order, new, at_once)
    for start in range(0, len(order), at_once):
        span = slice(start, start + at_once)
        predicted[span], epoch_tokens[span] = labels_of_sequence[order[span]], tokens[order[span]]


def _sort_by_length(out: Array, lengths: npt.NDArray[np.int32], order: Array, at_once: int) -> None:
    """Fill `out` [P] with the pieces of `order` [P] by descending length; pieces of one length stay in order."""
    longest = int(lengths.max())
    dtype = np.uint16 if longest < 1 << 16 else np.int32  # numpy sorts uint16 by a radix sort
    counts = np.zeros(longest + 1, np.int64)
    for start in range(0, len(lengths), at_once):
        counts += np.bincount(longest - lengths[start : start + at_once], minlength=len(counts))
    cursors = Cursors(counts)
    for start in range(0, len(order), at_once):
        part = order[start : start + at_once]
        places, arrival = cursors.places((longest - lengths[part]).astype(dtype))
        out[places] = part[arrival]


def _runs(edges: Ints, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of sequences [low, high) with at most `at_once` pieces, or of one sequence."""
    low = 0
    while low < len(edges) - 1:
        fit = np.searchsorted(edges, edges[low] + at_once, side="right")
        high = max(low + 1, int(fit) - 1)
        yield low, high
        low = high


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count < 2**31 else np.int64)
