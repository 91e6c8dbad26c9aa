"""What the data feed a model with: known once they are tokenised, assumed before. Plain numbers, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from aliquot.config.row_counts import filled_row
from aliquot.config.schema import RunConfig

Edges = tuple[int, ...]  # 0 = e0 < e1 < ... = the length of a sequence
_INDEX_BYTES = 48  # a piece of a document: what packing and the order of one epoch hold of it
_KEPT_KEYS = 128  # times a row's tokens: attention/tiled_attention.py keeps no more probabilities
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

    @property
    def row_tokens(self) -> float:
        """Of a sequence, those that pad it included."""
        return sum(each[-1] for each in self.samples) / len(self.samples)

    def row_lengths(self, sequences: int) -> int:
        """How many different numbers of tokens rows of so many sequences have."""
        return len({row[-1] for row in self._rows(sequences)})

    def heaviest(self, sequences: int) -> Edges:
        """Edges of the row of so many sequences that costs most memory among the samples."""
        return max(self._rows(sequences), key=lambda row: (_weight(row, _KEPT_KEYS), _weight(row)))

    def typical(self, sequences: int, ranks: int = 1, between: int = 1) -> tuple[tuple[float, Edges], ...]:
        """Rows of so many sequences, and how much of each takes as long as the slowest of so many ranks on average,
        which wait for each other whenever each has computed `between` rows. The heaviest is one of them where it can
        be: it is looked at anyway."""
        weights = list(map(_weight, self._rows(sequences)))
        mean = sum(weights) / len(weights)
        # Sums of so many rows differ less among each other than rows do, by the root of their number.
        wanted = mean + (_mean_largest(weights, ranks) - mean) / between**0.5
        heaviest = self.heaviest(sequences)
        over = _weight(heaviest) > wanted

        def distance(row: Edges) -> tuple[bool, float]:
            weight = _weight(row)
            return (weight > wanted) == over and weight != wanted, abs(weight - wanted)

        other = min(self._rows(sequences), key=distance)  # on the other side of what is wanted, if there is any
        apart = _weight(heaviest) - _weight(other)
        share = (wanted - _weight(other)) / apart if apart else 1.0
        return ((share, heaviest), (1 - share, other)) if 0 < share < 1 else ((1.0, other),)

    def _rows(self, sequences: int) -> Iterator[Edges]:
        """Of so many samples that follow each other, the first behind the last, beginning at each."""
        samples = self.samples * (1 + -(-sequences // len(self.samples)))
        return (self._row(samples[start : start + sequences]) for start in range(len(self.samples)))

    def _row(self, samples: tuple[Edges, ...]) -> Edges:
        row, at = [0], 0
        for edges in samples:
            row.extend(at + edge for edge in edges[1:])
            at += edges[-1]
        filled = at if self.fills_up is None else filled_row(at, len(samples), self.fills_up)
        return tuple(row) if filled == at else (*row, filled)


def _mean_largest(values: list[float], count: int) -> float:
    """The mean of the largest of `count` that are drawn from these."""
    total = len(values)
    ordered = enumerate(sorted(values), 1)
    return sum(value * ((place / total) ** count - ((place - 1) / total) ** count) for place, value in ordered)


def _weight(edges: Edges, kept_keys: int | None = None) -> float:
    """About what a row costs, in tokens: attention/tiled_attention.py computes so many probabilities, and keeps at most
    `kept_keys` of a token."""
    probabilities = 0
    for start, stop in pairwise(edges):
        length = stop - start
        probabilities += length * max(64, length) if length <= 256 else 128 * sum(range(128, length + 1, 128))
    if kept_keys is not None:
        probabilities = min(probabilities, kept_keys * edges[-1])
    return edges[-1] + probabilities / _PROBABILITIES_OF_A_TOKEN
