"""The workload of an optimizer step for the planner: batch sizes, and statistics of the data.

The statistics decide memory and time. They are measured after tokenisation and assumed before. This module does not
import torch, because the planner runs without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from aliquot.config.schema import RunConfig, TrainSection
from aliquot.nn.product_shapes import filler

Edges = tuple[int, ...]  # boundaries of documents in a sequence: 0 = e0 < e1 < ... = its length
_INDEX_BYTES = 48  # memory of the packing and the order of one epoch, per piece of a document
_PROBABILITIES_PER_TOKEN = 1000  # attention probabilities that take as long as all other work for a token (125 M model)
MAPPED_PIECES = 1 << 20  # with more pieces, the packing is in mapped files, whose memory the kernel can reclaim


@dataclass(frozen=True)
class BatchSize:
    """Batch sizes, in sequences."""

    total: int  # sequences of an optimizer step over all ranks
    micro: int  # sequences of one rank's forward pass

    def micro_batches(self, world_size: int, sources: int = 1) -> int:
        """Return the maximum number of micro-batches of a rank per optimizer step.

        Each micro-batch holds sequences of only one of the `sources`.
        """
        return -(-min(self.total, -(-self.total // self.micro) + sources - 1) // world_size)

    def is_even(self, world_size: int) -> bool:
        """Whether no rank has more sequences than with micro-batches of one sequence."""
        return self.sequences(world_size) == -(-self.total // world_size)

    def sequences(self, world_size: int, sources: int = 1) -> int:
        """Return the maximum number of sequences of a rank per optimizer step, if all `sources` contribute equally."""
        per_source = [self.total // sources + (source < self.total % sources) for source in range(sources)]
        whole = sum(count // self.micro for count in per_source)
        remainders = sorted((count % self.micro for count in per_source), reverse=True)
        # Micro-batch m goes to rank m % world_size; full micro-batches come first.
        per_rank = [self.micro * len(range(rank, whole, world_size)) for rank in range(world_size)]
        for number, remainder in enumerate(remainders, whole):
            per_rank[number % world_size] += remainder
        return max(per_rank)


def batch_size(train: TrainSection, world_size: int) -> BatchSize:
    """Return the batch sizes that the section `train` sets for `world_size` ranks.

    A micro-batch of `auto` counts as 1, until the plan has chosen its size.
    """
    total, steps, micro = train.global_batch_size, train.gradient_accumulation_steps, train.micro_batch_size
    if total is None:
        return BatchSize(micro * (steps or 1) * world_size, micro)
    if steps is None:
        return BatchSize(total, min(micro, total))
    return BatchSize(total, -(-total // (steps * world_size)))


def micro_batch_tokens(config: RunConfig, world_size: int) -> int:
    """Return the maximum number of tokens in one rank's forward pass."""
    return batch_size(config.train, world_size).micro * config.data.sequence_length


@dataclass(frozen=True)
class Workload:
    """Statistics of the data: mean counts per sequence, and sample sequences. None: unknown until the data are read."""

    samples: tuple[Edges, ...]  # document edges of consecutive sequences, padded tails included
    tokens: float  # mean tokens of a sequence, without padding
    predicted: float  # mean labels of a sequence
    sequences: int | None  # sequences of one epoch
    pieces: int  # pieces of documents in the packing; 0: unknown
    source: str  # where these numbers come from, as text for the user
    eval_sequences: int | None = None  # sequences of one evaluation; None also without evaluation
    fills_up: int | None = None  # the sequence length, if unpacked micro-batches are padded to one of a few lengths

    @classmethod
    def assumed(cls, config: RunConfig, document_tokens: int | None = None) -> Self:
        """Return the workload of documents of equal length: `document_tokens`, by default the sequence length."""
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
        """The private memory of a rank for the packing of the data."""
        return self.pieces * _INDEX_BYTES if self.pieces <= MAPPED_PIECES else 0

    def row_lengths(self, sequences: int) -> int:
        """Return the number of different lengths of rows that hold `sequences` consecutive samples."""
        return len({window.tokens for window in _windows(self, sequences)})

    def heaviest(self, sequences: int) -> Row:
        """Of all rows with `sequences` consecutive samples, return the row that needs the most memory."""
        return self._row(_heaviest(_windows(self, sequences)), sequences)

    def typical(self, sequences: int, ranks: int = 1, between: int = 1) -> tuple[tuple[float, Row], ...]:
        """Return one or two rows as (weight, row) whose weighted time approximates the time of the slowest rank.

        A row holds `sequences` sequences. The `ranks` ranks wait for each other after every `between` rows. One of the
        two is the heaviest row if possible, because the planner traces the heaviest row anyway.
        """
        windows = _windows(self, sequences)
        target = _mean(windows) * self.waiting(sequences, ranks, between)
        heaviest = _heaviest(windows)
        is_above = heaviest.weight > target

        def distance(window: _Window) -> tuple[bool, float]:
            return (window.weight > target) == is_above and window.weight != target, abs(window.weight - target)

        second = min(windows, key=distance)  # on the other side of the target, if any window is
        difference = heaviest.weight - second.weight
        share = (target - second.weight) / difference if difference else 1.0
        if not 0 < share < 1:
            return ((1.0, self._row(second, sequences)),)
        return (share, self._row(heaviest, sequences)), (1 - share, self._row(second, sequences))

    def waiting(self, sequences: int, ranks: int, between: int) -> float:
        """Return the time of the slowest of `ranks` ranks between two synchronisations, as a multiple of the mean."""
        windows = _windows(self, sequences)
        # The relative spread of the sum of n rows is smaller than the spread of one row by a factor of sqrt(n).
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
    """A row of consecutive samples with its padding. After the last sample, the row continues with the first."""

    edges: Edges
    labels: int


class _Window(NamedTuple):
    """A candidate row: the number of its first sample, and its approximate costs."""

    first: int
    tokens: int
    weight: float  # relative time of the row; `tokens` decide the memory for the backward pass


@lru_cache(maxsize=256)
def _windows(workload: Workload, sequences: int) -> tuple[_Window, ...]:
    """Return one candidate row for each sample, which is the first sample of the row."""
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
    """Return the expected maximum of the weights of `count` windows drawn at random."""
    total = len(windows)
    ordered = enumerate(sorted(window.weight for window in windows), 1)
    return sum(weight * ((place / total) ** count - ((place - 1) / total) ** count) for place, weight in ordered)


def _probabilities(edges: Edges) -> int:
    """Return how many attention probabilities nn/attention/tiled_attention.py computes for a query head of a row."""
    count = 0
    for start, stop in pairwise(edges):
        length = stop - start
        count += length * max(64, length) if length <= 256 else 128 * sum(range(128, length + 1, 128))
    return count
