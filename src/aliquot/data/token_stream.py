"""Tokenise a source during training: in segments, a few before they are needed.

A token stream is a directory with a token store for each segment of data.shuffle_buffer documents. Sequences are packed
and shuffled within a segment, so that a batch needs no later segment. One process of a node makes the segments; its
other ranks wait for their directories. A later run finds the segments and continues after the last one, at its place in
the source.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.data.cache import cached, damage
from aliquot.data.cuts import Cut
from aliquot.data.disk_arrays import locked
from aliquot.data.documents import Document
from aliquot.data.file_source import BEGINNING, FileSource, Place
from aliquot.data.packing import Packing, split
from aliquot.data.token_store import TokenStore
from aliquot.data.tokenize import EncoderPool, tokenize

_AHEAD = 2  # segments that are made before they are needed
_POLL_S = 0.05
_FACTS = "segment.json"


class Segment(NamedTuple):
    """The facts about a segment, which its directory holds as JSON."""

    sequences: int  # 0 if nothing is learned in the segment
    tokens: int
    place: tuple[int, int]  # of its last document in the source
    share: float  # of the bytes of the source, until the end of this segment
    is_last: bool
    left_out: dict[str, int]  # `left_out` and `firsts` are as in a token store
    firsts: dict[str, str]

    @classmethod
    def read(cls, directory: Path) -> Segment | None:
        """Return the facts about the segment in `directory`; None if they are missing or damaged."""
        values = read_checked_json(directory / _FACTS)
        return None if values is None else cls(**values | {"place": tuple(values["place"])})


class Stopped(Exception):
    """Raised in the thread that makes segments, or waits for one, after `close`."""


@dataclass
class SegmentMaker:
    """Makes the segments of a token stream, in a thread and the processes of `encoders`."""

    directory: Path
    source: FileSource
    cut: Cut | None
    dtype: np.dtype[Any]
    encoders: EncoderPool
    layout: tuple[int, int, bool]  # documents of a segment, data.sequence_length, data.packing
    check: Callable[[Path], None] = lambda directory: None  # raises UserError for tokens that the model does not have
    # The thread may begin after this rank has been pinned to few cores, but its encoders use all of them.
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(
            1, "aliquot-segments", os.sched_setaffinity, (0, os.sched_getaffinity(0))
        )
    )
    _segments: dict[int, Future[None]] = field(default_factory=dict)
    _reader: Iterator[tuple[Place, Document]] | None = None
    _place: Place = BEGINNING  # of the last document that `_reader` has yielded
    _is_stopped: bool = False

    def begin(self, index: int, again: bool = False) -> Future[None]:
        """Begin to make segment `index` and the next ones, if they do not exist; return the future of the first.

        `again`: even if this process has made or verified segment `index` before, because it is missing or damaged now.
        """
        if again and index in self._segments and self._segments[index].done():
            del self._segments[index]
        for number in range(index, index + 1 + _AHEAD):
            if number not in self._segments:
                self._segments[number] = self._thread.submit(self.make, number)
        self._segments = {number: future for number, future in self._segments.items() if number >= index}
        return self._segments[index]

    def make(self, index: int, progress: Callable[[int], None] = lambda done_bytes: None) -> None:
        """Make segment `index`, unless it is intact, or the source ends before it. Raises UserError."""
        target = segment_directory(self.directory, index)
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory):
            before = Segment.read(segment_directory(self.directory, index - 1)) if index else None
            if (index and (before is None or before.is_last)) or damage(target) is None:  # None: making it has failed
                return
            place = BEGINNING if before is None else Place(*before.place)
            if self._reader is None or self._place > place:
                self._reader, self._place = self.source.documents_after(place), place
            try:
                while self._place < place:  # another node, which shares the cache, has made segments meanwhile
                    self._place, _ = next(self._reader)
                reader = self._reader
                cached(target, lambda partial: self._write(partial, reader, is_first=index == 0, progress=progress))
            except BaseException:  # the reader is somewhere within the segment
                self._reader = None
                raise

    def _write(
        self, directory: Path, reader: Iterator[tuple[Place, Document]], is_first: bool, progress: Callable[[int], None]
    ) -> None:
        count, length, packed = self.layout
        ended = done_bytes = 0

        def documents() -> Iterator[Document]:
            nonlocal ended, done_bytes
            for self._place, document in reader:
                if self._is_stopped:
                    raise Stopped
                yield document
                ended, done_bytes = ended + document.ended, document.done_bytes
                if ended == count:
                    return

        left_out = self.source.left_out_files() if is_first else iter(())
        writer = tokenize(chain(left_out, documents()), self.cut, self.dtype, directory, self.encoders, progress)
        sequences = 0
        if writer.useful:
            store = TokenStore.open(directory)
            if any(len(pieces.start) for pieces in split(store, length)):
                sequences = Packing.of(store, length, packed).sequences
            self.check(directory)
        share = done_bytes / max(1, self.source.total_bytes)
        facts = Segment(sequences, writer.tokens, self._place, share, ended < count, writer.left_out, writer.firsts)
        publish_checked_json(directory / _FACTS, facts._asdict())

    def close(self) -> None:
        """Stop making segments."""
        self._is_stopped = True
        self._thread.shutdown(cancel_futures=True)
        self.encoders.close()


@dataclass
class TokenStream:
    """Read access to the segments of a token stream. `maker`: in the process that makes them."""

    directory: Path
    maker: SegmentMaker | None = None
    _is_stopped: bool = False

    def wait_for(self, index: int) -> Segment:
        """Return the facts about segment `index` as soon as it exists; the segment before it is not the last one."""
        while (segment := Segment.read(segment_directory(self.directory, index))) is None:
            self._make(index)
        return segment

    def open(self, index: int) -> TokenStore:
        """Return the tokens of segment `index`, whose bytes are verified before."""
        directory = segment_directory(self.directory, index)
        while damage(directory) is not None:
            self._make(index)
        return TokenStore.open(directory)

    def close(self) -> None:
        """End waiting, and making segments."""
        self._is_stopped = True
        if self.maker is not None:
            self.maker.close()

    def _make(self, index: int) -> None:
        """Make segment `index`, or wait a moment for the process that makes it."""
        if self._is_stopped:
            raise Stopped
        if self.maker is None:
            time.sleep(_POLL_S)
        else:
            self.maker.begin(index, again=True).result()  # raises the error of the maker


def segment_directory(directory: Path, index: int) -> Path:
    return directory / f"segment-{index:05}"
