"""The endless stream of the sequences of a source, in one segment or in those of token_stream.py."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from aliquot.data.data_order import TrainStore, drawn_seed
from aliquot.data.micro_batch_rows import Pieces, SequenceFormat
from aliquot.data.packing import Epoch, Packing
from aliquot.data.token_stream import Segment, TokenStream

_OPEN_SEGMENTS = 8  # segments that stay open, with their packing in memory


class SegmentSequences:
    """The sequences of all segments of a source in turn, shuffled within each segment; after the last one begin again.

    A source that is tokenised before training is one segment. `packing` describes the first segment. Tokens are
    numbered through all segments, so that the pieces of a batch refer to one store.

    Attributes:
        store: the tokens to which the pieces of `sequence` refer, and what is left out of the known segments.
        known_share: the share of the source that `packing` describes; an estimate if it is less than 1.
    """

    def __init__(self, source: TrainStore, format: SequenceFormat, seed: int) -> None:
        self.source, self.store, self._format = source, source.store, format
        self.packing = Packing.of(source.store, format.length, format.packed)
        self.known_share = 1.0
        # The seed includes the name, because two sources of equal size would otherwise be shuffled alike.
        self._seed = seed if not source.name else drawn_seed("source", seed, source.name)
        # The first sequence and the first token of each known segment, and of the next one.
        self._begins, self._token_begins = [0], [0]
        self._is_complete = source.stream is None  # whether the last segment is known
        if source.stream is None:
            self._begins.append(self.packing.sequences)
            # Two epochs, because a batch may span two epochs.
            self._epoch = lru_cache(2)(lambda segment, turn: self.packing.epoch(self._seed, turn))
        else:
            self._open = lru_cache(_OPEN_SEGMENTS)(source.stream.open)
            self._epoch = lru_cache(_OPEN_SEGMENTS)(self._epoch_of)
            mask = None if self.store.mask is None else self._all_tokens("mask")
            self.store = replace(self.store, tokens=self._all_tokens("tokens"), mask=mask, left_out={}, firsts={})
            self.known_share = self._add_segment(source.stream).share or 1.0

    def wait_for(self, count: int) -> None:
        """Return when the first `count` sequences can be read."""
        if count:
            self._place(count - 1)

    def close(self) -> None:
        """End all work in the background."""
        if self.source.stream is not None:
            self.source.stream.close()

    @property
    def sequence_tokens(self) -> Fraction:
        """The mean number of tokens in a sequence of this source."""
        return Fraction(self.packing.tokens, self.packing.sequences)

    def sequence(self, index: int) -> Pieces:
        tokens_before, epoch, within = self._place(index)
        return [(tokens_before + start, length) for start, length in epoch.sequence(within)]

    def lengths(self, index: int) -> npt.NDArray[np.int32]:
        return np.array([length for _, length in self.sequence(index)], np.int32)

    def counts(self, first: int, stop: int) -> tuple[int, int]:
        """Return the numbers of (labels, tokens without padding) in sequences [first, stop)."""
        counts = [epoch.counts(within) for _, epoch, within in map(self._place, range(first, stop))]
        return sum(labels for labels, _ in counts), sum(tokens for _, tokens in counts)

    def _place(self, index: int) -> tuple[int, Epoch, int]:
        """Return (first token of the segment, its sequences, index among these); wait until the segment exists."""
        stream = self.source.stream
        while stream is not None and index >= self._begins[-1] and not self._is_complete:
            self._add_segment(stream)
        turn, index = divmod(index, self._begins[-1]) if self._is_complete else (0, index)
        segment = bisect_right(self._begins, index) - 1
        if stream is not None and stream.maker is not None and not self._is_complete:
            stream.maker.begin(segment + 1)
        return self._token_begins[segment], self._epoch(segment, turn), index - self._begins[segment]

    def _add_segment(self, stream: TokenStream) -> Segment:
        segment = stream.wait_for(len(self._begins) - 1)
        self._begins.append(self._begins[-1] + segment.sequences)
        self._token_begins.append(self._token_begins[-1] + segment.tokens)
        self._is_complete = segment.is_last
        self.store = replace(
            self.store,
            left_out=Counter(self.store.left_out) + Counter(segment.left_out),
            firsts={**segment.firsts, **self.store.firsts},
        )
        return segment

    def _epoch_of(self, segment: int, turn: int) -> Epoch:
        packing = Packing.of(self._open(segment), self._format.length, self._format.packed)
        return packing.epoch(drawn_seed("segment", self._seed, segment), turn)

    def _all_tokens(self, name: str) -> Any:
        return _JoinedArrays(self._token_begins, lambda segment: getattr(self._open(segment), name))


@dataclass(frozen=True)
class _JoinedArrays:
    """The arrays of several segments as one array, of which only slices within a segment can be read."""

    begins: list[int]  # the first element of each segment, and of the next one
    array: Callable[[int], npt.NDArray[Any]]

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        segment = bisect_right(self.begins, span.start) - 1
        before = self.begins[segment]
        return self.array(segment)[span.start - before : span.stop - before]
