"""Encode documents in several processes, and write the tokens to a token store in the order of the documents."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from aliquot.core.errors import DataError
from aliquot.data.cuts import LONGEST_CHARACTERS, PIECE_CHARACTERS, Cut, pieces
from aliquot.data.documents import Document
from aliquot.data.encoder import Encoded, Encoder, EncoderProcess, Texts
from aliquot.data.text_encoder import EncoderSpec
from aliquot.data.token_store import StoreWriter
from aliquot.machine.cpu import read_cpu
from aliquot.machine.memory import memory_limit

Progress = Callable[[int, int], None]  # (bytes done, bytes of the source)
CHUNK_CHARACTERS = 1 << 20
CHUNK_TEXTS = 8192
INEXACT_CUT = (
    "a stretch of text without an exact place for a cut, too long to be encoded whole: one or two tokens at the cut may"
    " differ"
)
_ENCODER_BYTES = 256 << 20  # memory of an encoder process; records of megabytes with answers need 1 GiB more
AHEAD = 4  # chunks per worker process that may be in memory at once


@dataclass(frozen=True)
class Chunk:
    """Texts that one worker process encodes at once."""

    texts: Texts
    places: list[str]  # file and line of each text that comes from a record
    done_bytes: int


def tokenize(
    documents: Iterator[Document],
    cut: Cut | None,
    dtype: np.dtype[Any],
    directory: Path,
    encoders: EncoderPool,
    progress: Callable[[int], None],
) -> StoreWriter:
    """Encode `documents` into the files of a token store in `directory`, and return its writer.

    `progress` is called with the number of bytes of the source that have been encoded and written.
    """
    spec = encoders.spec
    with StoreWriter(directory, dtype, spec.answers, spec.pairs, spec.rated) as writer:
        for chunk, encoded in encoders.encode(_chunks(documents, spec, cut, writer)):
            writer.write(encoded, np.repeat(chunk.texts.last, 2 if spec.pairs else 1), chunk.places)
            progress(chunk.done_bytes)
    writer.finish()
    return writer


@dataclass
class EncoderPool:
    """Encodes chunks in worker processes, which begin with the first chunks and end with `close`.

    If there is only one chunk, this process encodes it.
    """

    spec: EncoderSpec
    num_proc: int | None  # number of workers; None: the physical cores of this process, if the memory suffices
    _workers: list[EncoderProcess] = field(default_factory=list)
    _encoder: Encoder | None = None

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def encode(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Yield chunks with their tokens, in order; at most AHEAD chunks per worker process are in memory."""
        first = list(islice(chunks, 2))
        encode = self._encode_here if len(first) < 2 else self._encode_in_workers
        return encode(chain(first, chunks))

    def _encode_here(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        for chunk in chunks:
            self._encoder = self._encoder or Encoder(self.spec)
            yield chunk, self._encoder.encode(chunk.texts)

    def _encode_in_workers(self, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        while len(self._workers) < (self.num_proc or _cores()):
            self._workers.append(EncoderProcess(self.spec))
        idle = list(self._workers)

        def encode(chunk: Chunk) -> tuple[Chunk, Encoded]:
            worker = idle.pop()
            worker.send(chunk.texts)
            encoded = worker.receive()
            idle.append(worker)
            return chunk, encoded

        in_progress: deque[Future[tuple[Chunk, Encoded]]] = deque()
        threads = ThreadPoolExecutor(len(idle), thread_name_prefix="aliquot-encoders")  # one waits for each worker
        try:
            for chunk in chunks:
                in_progress.append(threads.submit(encode, chunk))
                if len(in_progress) == AHEAD * len(self._workers):
                    yield in_progress.popleft().result()
            yield from (future.result() for future in in_progress)
        finally:
            threads.shutdown(cancel_futures=True)


def _chunks(documents: Iterator[Document], spec: EncoderSpec, cut: Cut | None, writer: StoreWriter) -> Iterator[Chunk]:
    """Yield chunks of texts with about CHUNK_CHARACTERS; long documents are cut into pieces (see cuts.py).

    `writer` counts the formats of documents, the documents that are left out, and inexact cuts (see cuts.py).
    """
    texts: list[tuple[str, bool, bool, str]] = []  # (text, first, last, where)
    characters = done_bytes = 0
    held: list[str] = []  # text of the current document that has not been put into a chunk
    searched = 0
    begins = True
    for document in documents:
        if document.blank and not held:
            writer.leave_out(
                document.reason or "a blank record, left out", 1, document.where if document.reason else ""
            )
            continue
        for reason, detail in document.notes:
            writer.leave_out(reason, 1, ": ".join(filter(None, (document.where, detail))))
        kinds = document.kind != "text", document.kind == "preference", document.kind == "rated"
        if kinds != (spec.answers, spec.pairs, spec.rated):
            raise DataError(
                "some documents are text and some have answers: give them sources of their own, data.sources"
            )
        held.append(document.text)
        if not document.ended and cut is None and sum(map(len, held)) < 2 * LONGEST_CHARACTERS:
            continue
        parts = [document.text]
        if not spec.answers:
            forced = partial(writer.leave_out, INEXACT_CUT, 1, "")
            parts = list(pieces("".join(held), cut, searched=searched, forced=forced))
        held = [] if document.ended else [parts.pop()]
        # `pieces` has searched the held text: an exact cut can only begin at the last character.
        searched = len(held[0]) - 1 if held and len(held[0]) > PIECE_CHARACTERS else 0
        before_bytes, ends = done_bytes, list(accumulate(map(len, parts)))
        for index, (part, end) in enumerate(zip(parts, ends, strict=True)):
            texts.append((part, begins, document.ended and index == len(parts) - 1, document.where))
            begins = False
            characters += len(part)
            done_bytes = before_bytes + (document.done_bytes - before_bytes) * end // max(1, ends[-1])
            if characters >= CHUNK_CHARACTERS or len(texts) >= CHUNK_TEXTS:
                yield _chunk(texts, done_bytes)
                texts, characters = [], 0
        if document.ended:
            writer.formats[document.kind] += 1
            begins = True
    if texts:
        yield _chunk(texts, done_bytes)


def _chunk(texts: list[tuple[str, bool, bool, str]], done_bytes: int) -> Chunk:
    text, first, last, places = zip(*texts, strict=True)
    return Chunk(Texts(list(text), np.array(first, bool), np.array(last, bool)), list(places), done_bytes)


def _cores() -> int:
    """Return the default number of worker processes: the cores of the container, limited by its memory."""
    return max(1, min(read_cpu().usable_cores, memory_limit() // _ENCODER_BYTES))
