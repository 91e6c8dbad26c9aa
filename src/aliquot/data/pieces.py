"""Documents -> pieces of at most `sequence_length` tokens, in the order of the store and some at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aliquot.data.kept_arrays import AT_ONCE
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
