"""What the data feed a model with: known once they are tokenised, assumed before. Plain numbers, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from aliquot.config.schema import RunConfig
from aliquot.nn.row_counts import filler

Edges = tuple[int, ...]  # 0 = e0 < e1 < ... = the length of a sequence
_INDEX_BYTES = 48  # a piece of a document: what packing and the order of one epoch hold of it
_PROBABILITIES_OF_A_TOKEN = 1000  # cost about as much as all else of a token, time or memory, in a model of 125 M
MAPPED_PIECES = 1 << 20  # with more of them the index is in files, which the kernel may take from memory again


@dataclass(frozen=True)
class Workload:
    """Counts are means over the data, per sequence."""

    samples: tuple[Edges, ...]  # document edges of some sequences that follow each other, padded tails included
    tokens: float  # real ones
    predicted: float  # that have a label
    sequences: int | None  # of one epoch; None: not known before the data are read
    pieces: int  # of documents, of which the data's index is made; 0: not known
    source: str  # where this comes from, for the reader
    eval_sequences: int | None = None  # of one evaluation; None: there is none, or it is not known before the data are
    fills_up: int | None = None  # sequences are not packed and of at most so many tokens: micro-batches are filled up

    @classmethod
    def assumed(cls, config: RunConfig, document_tokens: int | None = None) -> Self:
        """Documents of `document_tokens`, or each as long as a sequence."""
        length = config.data.sequence_length
        each = min(document_tokens or length, length)
        count = length // each if config.data.packing else 1
        edges = tuple(each * number for number in range(count + 1))
        said = f"documents of {each:,} tokens" + ("" if document_tokens else ", assumed: one a sequence")
        padded = config.data.packing and edges[-1] < length  # rows of one document are as long as it is
        return cls(((*edges, length) if padded else edges,), count * each, count * (each - 1), None, 0, said)

    @property
    def index_bytes(self) -> int:
        """What each rank holds of the data's index."""
        return self.pieces * _INDEX_BYTES if self.pieces <= MAPPED_PIECES else 0

    def row_lengths(self, sequences: int) -> int:
        """How many different numbers of tokens rows of so many sequences have."""
        return len({window.tokens for window in _windows(self, sequences)})

    def heaviest(self, sequences: int) -> Row:
        """Of so many sequences, what costs most memory among the samples."""
        return self._row(_heaviest(_windows(self, sequences)), sequences)

    def typical(self, sequences: int, ranks: int = 1, between: int = 1) -> tuple[tuple[float, Row], ...]:
        """Rows of so many sequences, and how much of each takes as long as the slowest of so many ranks on average,
        which wait for each other whenever each has computed `between` rows. The heaviest is one of them where it can
        be: it is looked at anyway."""
        windows = _windows(self, sequences)
        wanted = _mean(windows) * self.waiting(sequences, ranks, between)
        heaviest = _heaviest(windows)
        over = heaviest.weight > wanted

        def distance(window: _Window) -> tuple[bool, float]:
            return (window.weight > wanted) == over and window.weight != wanted, abs(window.weight - wanted)

        other = min(windows, key=distance)  # on the other side of what is wanted, if there is any
        apart = heaviest.weight - other.weight
        share = (wanted - other.weight) / apart if apart else 1.0
        if not 0 < share < 1:
            return ((1.0, self._row(other, sequences)),)
        return (share, self._row(heaviest, sequences)), (1 - share, self._row(other, sequences))

    def waiting(self, sequences: int, ranks: int, between: int) -> float:
        """How many times as long as a rank on average the slowest of so many takes."""
        windows = _windows(self, sequences)
        # Sums of so many rows differ less among each other than rows do, by the root of their number.
        return 1 + (_mean_largest(windows, ranks) / _mean(windows) - 1) / math.sqrt(between)

    def _row(self, window: _Window, sequences: int) -> Row:
        edges, at = [0], 0
        for number in range(window.first, window.first + sequences):
            sample = self.samples[number % len(self.samples)]
            edges.extend(at + edge for edge in sample[1:])
            at += sample[-1]
        labels = round(self.predicted * at * len(self.samples) / sum(each[-1] for each in self.samples))
        if self.fills_up is not None:
            edges.extend(accumulate(filler(at, sequences, self.fills_up), initial=edges.pop()))
        return Row(tuple(edges), labels)


@dataclass(frozen=True)
class Row:
    """Sequences that follow each other, the first behind the last; and what fills them up."""

    edges: Edges
    labels: int


class _Window(NamedTuple):
    """Where a row begins, and about what it costs, in tokens."""

    first: int
    tokens: int
    weight: float  # of time; what a row keeps for its backward pass follows from its tokens


@lru_cache(maxsize=256)
def _windows(workload: Workload, sequences: int) -> tuple[_Window, ...]:
    """One that begins at each sample."""
    samples = workload.samples
    costs = [(edges[-1], _probabilities(edges)) for edges in samples]
    found = []
    for first in range(len(samples)):
        taken = [costs[number % len(samples)] for number in range(first, first + sequences)]
        tokens, probabilities = map(sum, zip(*taken, strict=True))
        if workload.fills_up is not None:
            lengths = filler(tokens, sequences, workload.fills_up)
            tokens, probabilities = tokens + sum(lengths), probabilities + _probabilities((0, *accumulate(lengths)))
        found.append(_Window(first, tokens, tokens + probabilities / _PROBABILITIES_OF_A_TOKEN))
    return tuple(found)


def _heaviest(windows: tuple[_Window, ...]) -> _Window:
    return max(windows, key=lambda window: (window.tokens, window.weight))


def _mean(windows: tuple[_Window, ...]) -> float:
    return sum(window.weight for window in windows) / len(windows)


def _mean_largest(windows: tuple[_Window, ...], count: int) -> float:
    """The mean of the largest of `count` that are drawn from these."""
    total = len(windows)
    ordered = enumerate(sorted(window.weight for window in windows), 1)
    return sum(weight * ((place / total) ** count - ((place - 1) / total) ** count) for place, weight in ordered)


def _probabilities(edges: Edges) -> int:
    """That nn/attention/tiled_attention.py computes, of a query head."""
    found = 0
    for start, stop in pairwise(edges):
        length = stop - start
        found += length * max(64, length) if length <= 256 else 128 * sum(range(128, length + 1, 128))
    return found
