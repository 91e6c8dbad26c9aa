"""The work of a step: sizes of batches, and statistics of the data that decide memory and time.

Statistics are measured after tokenisation and assumed before. This module needs no torch, because plans use it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from aliquot.config.schema import RunConfig, TrainSection
from aliquot.nn.product_shapes import filler

Edges = tuple[int, ...]  # 0 = e0 < e1 < ... = the length of a sequence
_INDEX_BYTES = 48  # of packing and of the order of one epoch, for each piece of a document
_PROBABILITIES_PER_TOKEN = 1000  # attention probabilities that cost as much as the rest of a token, in a 125 M model
MAPPED_PIECES = 1 << 20  # with more pieces the index is in mapped files, whose memory the kernel can reclaim


@dataclass(frozen=True)
class BatchSize:
    """Sizes in sequences."""

    total: int  # of an optimizer step over all ranks
    micro: int  # of one rank's forward pass

    def micro_batches(self, world_size: int, sources: int = 1) -> int:
        """Return the most micro-batches of a rank per optimizer step; a micro-batch comes from one of `sources`."""
        all_ranks = min(self.total, -(-self.total // self.micro) + sources - 1)
        return -(-all_ranks // world_size)

    def sequences(self, world_size: int, sources: int = 1) -> int:
        """Return the most sequences of a rank in an optimizer step to which the `sources` contribute equally."""
        per_source = [self.total // sources + (source < self.total % sources) for source in range(sources)]
        whole = sum(count // self.micro for count in per_source)
        remainders = sorted((count % self.micro for count in per_source), reverse=True)
        # Micro-batch m goes to rank m % world_size; full micro-batches come first.
        per_rank = [self.micro * len(range(rank, whole, world_size)) for rank in range(world_size)]
        for number, remainder in enumerate(remainders, whole):
            per_rank[number % world_size] += remainder
        return max(per_rank)


def batch_size(train: TrainSection, world_size: int) -> BatchSize:
    """Return the batch sizes of the section `train` at `world_size` ranks."""
    total, steps = train.global_batch_size, train.gradient_accumulation_steps
    if total is None:
        micro = train.per_device_train_batch_size
        return BatchSize(micro * (steps or 1) * world_size, micro)
    if steps is None:
        return BatchSize(total, min(train.per_device_train_batch_size, total))
    return BatchSize(total, -(-total // (steps * world_size)))


def micro_batch_tokens(config: RunConfig, world_size: int) -> int:
    """Return the most tokens of one rank's forward pass."""
    return batch_size(config.train, world_size).micro * config.data.sequence_length


@dataclass(frozen=True)
class Workload:
    """Mean counts per sequence, and sample sequences. None means not known before the data are read."""

    samples: tuple[Edges, ...]  # document edges of consecutive sequences, padded tails included
    tokens: float  # without padding
    predicted: float  # tokens with a label
    sequences: int | None  # of one epoch
    pieces: int  # of documents, in the data's index; 0: not known
    source: str  # of these numbers, for the reader
    eval_sequences: int | None = None  # of one evaluation; None also without evaluation
    fills_up: int | None = None  # the sequence length, if sequences are not packed and micro-batches are padded

    @classmethod
    def assumed(cls, config: RunConfig, document_tokens: int | None = None) -> Self:
        """Return the workload of equal documents of `document_tokens`, by default as long as a sequence."""
        length = config.data.sequence_length
        document = min(document_tokens or length, length)
        count = length // document if config.data.packing else 1
        edges = tuple(document * number for number in range(count + 1))
        source = f"documents of {document:,} tokens" + ("" if document_tokens else ", assumed: one a sequence")
        padded = config.data.packing and edges[-1] < length  # an unpacked row ends with its document
        samples = ((*edges, length) if padded else edges,)
        return cls(samples, count * document, count * (document - 1), None, 0, source)

    @property
    def index_bytes(self) -> int:
        """The memory of the data's index on a rank."""
        return self.pieces * _INDEX_BYTES if self.pieces <= MAPPED_PIECES else 0

    def row_lengths(self, sequences: int) -> int:
        """Return the number of different lengths, in tokens, of rows of `sequences` sequences."""
        return len({window.tokens for window in _windows(self, sequences)})

    def heaviest(self, sequences: int) -> Row:
        """Return the row of `sequences` sequences among the samples that needs the most memory."""
        return self._row(_heaviest(_windows(self, sequences)), sequences)

    def typical(self, sequences: int, ranks: int = 1, between: int = 1) -> tuple[tuple[float, Row], ...]:
        """Return (weight, row) of one or two rows whose weighted time approximates the slowest of `ranks` ranks.

        Ranks wait for all others after every `between` rows. The heaviest row is one of the two if possible, because
        the planner traces it anyway.
        """
        windows = _windows(self, sequences)
        target = _mean(windows) * self.waiting(sequences, ranks, between)
        heaviest = _heaviest(windows)
        is_above = heaviest.weight > target

        def distance(window: _Window) -> tuple[bool, float]:
            return (window.weight > target) == is_above and window.weight != target, abs(window.weight - target)

        second = min(windows, key=distance)  # on the other side of the target, if there is such a window
        difference = heaviest.weight - second.weight
        share = (target - second.weight) / difference if difference else 1.0
        if not 0 < share < 1:
            return ((1.0, self._row(second, sequences)),)
        return (share, self._row(heaviest, sequences)), (1 - share, self._row(second, sequences))

    def waiting(self, sequences: int, ranks: int, between: int) -> float:
        """Return the time of the slowest of `ranks` ranks as a multiple of the mean."""
        windows = _windows(self, sequences)
        # The relative spread of a sum of rows is smaller than that of a row by the square root of their number.
        return 1 + (_mean_largest(windows, ranks) / _mean(windows) - 1) / math.sqrt(between)

    def _row(self, window: _Window, sequences: int) -> Row:
        edges, tokens = [0], 0
        for number in range(window.first, window.first + sequences):
            sample = self.samples[number % len(self.samples)]
            edges.extend(tokens + edge for edge in sample[1:])
            tokens += sample[-1]
        labels = round(self.predicted * tokens * len(self.samples) / sum(sample[-1] for sample in self.samples))
        if self.fills_up is not None:
            edges.extend(accumulate(filler(tokens, sequences, self.fills_up), initial=edges.pop()))
        return Row(tuple(edges), labels)


@dataclass(frozen=True)
class Row:
    """Consecutive sequences, where the first follows the last, and their padding."""

    edges: Edges
    labels: int


class _Window(NamedTuple):
    """The first sequence of a row and its approximate cost, in tokens."""

    first: int
    tokens: int
    weight: float  # its time; its memory for the backward pass follows from its tokens


@lru_cache(maxsize=256)
def _windows(workload: Workload, sequences: int) -> tuple[_Window, ...]:
    """Return a window for every sample as the first."""
    samples = workload.samples
    costs = [(edges[-1], _probabilities(edges)) for edges in samples]
    windows = []
    for first in range(len(samples)):
        window = [costs[number % len(samples)] for number in range(first, first + sequences)]
        tokens, probabilities = map(sum, zip(*window, strict=True))
        if workload.fills_up is not None:
            lengths = filler(tokens, sequences, workload.fills_up)
            tokens, probabilities = tokens + sum(lengths), probabilities + _probabilities((0, *accumulate(lengths)))
        windows.append(_Window(first, tokens, tokens + probabilities / _PROBABILITIES_PER_TOKEN))
    return tuple(windows)


def _heaviest(windows: tuple[_Window, ...]) -> _Window:
    return max(windows, key=lambda window: (window.tokens, window.weight))


def _mean(windows: tuple[_Window, ...]) -> float:
    return sum(window.weight for window in windows) / len(windows)


def _mean_largest(windows: tuple[_Window, ...], count: int) -> float:
    """Return the expected largest weight of `count` windows drawn at random."""
    total = len(windows)
    ordered = enumerate(sorted(window.weight for window in windows), 1)
    return sum(weight * ((place / total) ** count - ((place - 1) / total) ** count) for place, weight in ordered)


def _probabilities(edges: Edges) -> int:
    """Return the attention probabilities of a query head that nn/attention/tiled_attention.py computes."""
    count = 0
    for start, stop in pairwise(edges):
        length = stop - start
        count += length * max(64, length) if length <= 256 else 128 * sum(range(128, length + 1, 128))
    return count
