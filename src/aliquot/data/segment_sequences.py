"""The endless stream of the sequences of a source that is tokenised during training (see token_stream.py)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy.typing as npt

from aliquot.data.data_order import Stream, TrainStore, drawn_seed
from aliquot.data.micro_batch_rows import SequenceFormat
from aliquot.data.packing import Epoch, Packing
from aliquot.data.token_store import TokenStore
from aliquot.data.token_stream import Segment

_OPEN_SEGMENTS = 8  # segments that stay open, with their packing in memory


def stream_of(source: TrainStore, format: SequenceFormat, seed: int) -> Stream:
    """Return the sequences of a source, in the order of training."""
    packing = Packing.of(source.store, format.length, format.packed)
    return Stream(source, packing, seed) if source.stream is None else SegmentSequences(source, packing, seed, format)


class SegmentSequences(Stream):
    """The sequences of all segments in turn, shuffled within each segment; after the last one begin again.

    `packing` and `epoch` describe the first segment. Tokens are numbered through all segments, so that the pieces of a
    batch refer to one store.
    """

    def __init__(self, source: TrainStore, packing: Packing, seed: int, format: SequenceFormat) -> None:
        super().__init__(source, packing, seed)
        assert source.stream is not None
        self._segments, self._format = source.stream, format
        self._stops: list[int] = []  # number of sequences until the end of each known segment
        self._token_stops: list[int] = []
        self._is_complete = False  # whether the last segment is known
        self._open = lru_cache(_OPEN_SEGMENTS)(self._segments.open)
        self._epoch = lru_cache(_OPEN_SEGMENTS)(self._epoch_of)
        mask = None if source.store.mask is None else self._all_tokens("mask")
        self._store = replace(source.store, tokens=self._all_tokens("tokens"), mask=mask, left_out={}, firsts={})
        self._first_share = self._add_segment().share

    @property
    def store(self) -> TokenStore:
        """The tokens of all segments, and what is left out of the known segments."""
        return self._store

    @property
    def known_share(self) -> float:
        return self._first_share or 1.0

    def wait_for(self, count: int) -> None:
        if count:
            self._place(count - 1)

    def close(self) -> None:
        self._segments.close()

    def _place(self, index: int) -> tuple[int, Epoch, int]:
        """Return (first token of the segment, its sequences, index among these); wait until the segment exists."""
        while index >= self._stops[-1] and not self._is_complete:
            self._add_segment()
        turn, index = divmod(index, self._stops[-1]) if self._is_complete else (0, index)
        segment = bisect_right(self._stops, index)
        if not self._is_complete and self._segments.maker is not None:
            self._segments.maker.begin(segment + 1)
        tokens_before, before = (self._token_stops[segment - 1], self._stops[segment - 1]) if segment else (0, 0)
        return tokens_before, self._epoch(segment, turn), index - before

    def _add_segment(self) -> Segment:
        segment = self._segments.wait_for(len(self._stops))
        self._stops.append(segment.sequences + (self._stops[-1] if self._stops else 0))
        self._token_stops.append(segment.tokens + (self._token_stops[-1] if self._token_stops else 0))
        self._is_complete = segment.is_last
        self._store = replace(
            self._store,
            left_out=Counter(self._store.left_out) + Counter(segment.left_out),
            firsts={**segment.firsts, **self._store.firsts},
        )
        return segment

    def _epoch_of(self, segment: int, turn: int) -> Epoch:
        packing = Packing.of(self._open(segment), self._format.length, self._format.packed)
        return packing.epoch(drawn_seed("segment", self._seed, segment), turn)

    def _all_tokens(self, name: str) -> Any:
        return _JoinedArrays(self._token_stops, lambda segment: getattr(self._open(segment), name))


@dataclass(frozen=True)
class _JoinedArrays:
    """The arrays of several segments as one array, of which only slices within a segment can be read."""

    stops: list[int]  # number of elements until the end of each segment
    array: Callable[[int], npt.NDArray[Any]]

    def __getitem__(self, span: slice) -> npt.NDArray[Any]:
        segment = bisect_right(self.stops, span.start)
        before = self.stops[segment - 1] if segment else 0
        return self.array(segment)[span.start - before : span.stop - before]
