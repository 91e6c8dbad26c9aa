"""What the data feed a model with: known once they are tokenised, assumed before. Plain numbers, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from aliquot.config.schema import RunConfig

Edges = tuple[int, ...]  # 0 = e0 < e1 < ... = the length of a sequence
_INDEX_BYTES = 48  # a piece of a document: what packing and the order of one epoch hold of it
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

    def heaviest(self, sequences: int) -> Edges:
        """Edges of the row of so many sequences that costs most memory among the samples."""
        return _row(max(self._windows(sequences), key=lambda window: sum(_scores(each, 512) for each in window)))

    def typical(self, sequences: int) -> Edges:
        """Edges of the row of so many sequences that comes nearest to the mean of the samples in what takes time: its
        tokens, and how many pairs of them attention multiplies."""
        tokens = self.row_tokens * sequences
        scores = sum(map(_scores, self.samples)) / len(self.samples) * sequences

        def distance(window: tuple[Edges, ...]) -> float:
            own_tokens, own_scores = sum(each[-1] for each in window), sum(map(_scores, window))
            return abs(own_tokens / tokens - 1) + abs(own_scores / scores - 1)

        return _row(min(self._windows(sequences), key=distance))

    def _windows(self, sequences: int) -> list[tuple[Edges, ...]]:
        """So many samples that follow each other, as often as there are."""
        samples = self.samples * -(-sequences // len(self.samples))
        return [samples[start : start + sequences] for start in range(len(samples) - sequences + 1)]


def _row(window: tuple[Edges, ...]) -> Edges:
    row, at = [0], 0
    for edges in window:
        row.extend(at + edge for edge in edges[1:])
        at += edges[-1]
    return tuple(row)


def _scores(edges: Edges, keys: int | None = None) -> int:
    """About how many probabilities attention/tiled_attention.py computes, or keeps: those of blocks that see at most so
    many `keys`."""
    total = 0
    for start, stop in pairwise(edges):
        length = stop - start
        most = min(length, keys or length)
        total += length * max(64, length) if length <= 256 else 128 * sum(range(128, most + 1, 128))
    return total
