"""What fills the arrays of a packing and of its epochs, `at_once` elements after the other.

Private memory grows with neither pieces nor sequences: counting sorts in place of sorts, and ranges in place of a
sequence for each piece. It grows with the ranges: with how many different lengths there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.core.errors import DataError
from aliquot.data.best_fit import Placement, best_fit, one_each
from aliquot.data.kept_arrays import AT_ONCE, Array, NewArrays
from aliquot.data.orders import Cursors
from aliquot.data.pieces import Pieces, split
from aliquot.data.token_store import TokenStore

Ints = npt.NDArray[np.int64]
Order = Callable[[Array, NewArrays, int], None]  # fills an array [n] with a permutation of n, so many at once


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
    new: NewArrays,
    pieces: Pieces,
    slots: npt.NDArray[Any],
    edges: Ints,
    tokens: Ints,
    order_pieces: Order,
    order_sequences: Order,
    at_once: int = AT_ONCE,
) -> None:
    """All arrays of an `Epoch`: of the pieces of one length the first in their order has the first slot."""
    lengths, labels, slots, edges, tokens = map(np.asarray, (pieces.length, pieces.predicted, slots, edges, tokens))
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
