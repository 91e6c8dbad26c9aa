"""Which lengths share a sequence: best-fit decreasing, on the histogram of the lengths.

All pieces of one length are placed in a few range operations, so that the work grows with the number of different
lengths and not with that of the pieces.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


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
