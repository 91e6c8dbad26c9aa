"""Transfer parts (see parts.py) in bounded pieces: `fill` copies from files to a store, `drain` the other way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import TracebackType

import torch
from torch import Tensor

from aliquot.core.errors import UsageError
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.parts import DEPTH, PIECE_BYTES, Kind, Part, PartSource, PartStore, ViewableStore
from aliquot.tensor_io.range_io import SourceFile, TargetFile, exceeds_page_cache, mapped_tensor

THREADS = 4  # more threads are not faster on a local disk; a network file system needs several requests at once

Maps = Mapping[Kind, Mapping[str, TensorEntry]]  # kind -> name -> location of each tensor to transfer


@dataclass(frozen=True)
class Progress:
    """The progress of this rank's transfer, in bytes of files."""

    done_bytes: int
    total_bytes: int


Watch = Callable[[Progress], None]  # called after every piece; an exception ends the transfer


def read_part(source: PartSource, part: Part) -> Tensor:
    """Return the values of a part: a flat fp32 tensor."""
    values = torch.empty(part.numel)
    source.read(part, part.start, values)
    return values


def fill(
    store: PartStore,
    maps: Maps,
    checksums: BlockChecksums | None = None,
    watch: Watch | None = None,
    check: Callable[[TensorEntry, int, Tensor], None] = lambda entry, start, values: None,
) -> int:
    """Read from files the values of all parts of `store` whose kind is in `maps`; return the number of bytes read.

    Only the calling thread accesses `store`, in the order of the elements of each part. `check` receives each piece
    (location of the tensor, first element, flat values in the dtype of the store); an exception ends the transfer.
    Raises UserError.
    """
    work = _Transfer(store, maps, watch)
    values = mapped_tensor(PIECE_BYTES, torch.float32)  # stored elements may have one byte each

    def store_piece(piece: _Piece, stored: Tensor) -> None:
        if piece.view is None:
            as_fp32 = stored if stored.dtype == torch.float32 else values[: piece.numel].copy_(stored)
            check(piece.entry, piece.start, as_fp32)
            store.write(piece.part, piece.start, as_fp32)
        else:
            if piece.direct is None:
                piece.view.copy_(stored)
            check(piece.entry, piece.start, piece.view)
        work.count(piece)

    drop = exceeds_page_cache(entry for entries in maps.values() for entry in entries.values())
    for pieces in work.pieces_of_files():
        with SourceFile(pieces[0].entry, checksums, drop) as file, Pipeline() as pipeline:
            for piece in pieces:
                stored = piece.direct
                if stored is None:
                    stored = pipeline.buffer(piece)
                file.announce(piece.entry, piece.start, piece.numel)
                pipeline.add(partial(file.read, piece.entry, piece.start, stored), partial(store_piece, piece, stored))
    return work.done_bytes


def drain(store: PartSource, maps: Maps, checksums: BlockChecksums | None = None, watch: Watch | None = None) -> int:
    """Write to files the values of all parts of `store` whose kind is in `maps`, and fsync the files.

    Returns the number of bytes written. Only the calling thread accesses `store`, in the order of the elements of each
    part. Raises UserError, also for values that overflow the dtype of the file.
    """
    work = _Transfer(store, maps, watch)
    values = mapped_tensor(PIECE_BYTES, torch.float32)

    def read_piece(piece: _Piece, stored: Tensor) -> None:
        if piece.view is not None:
            _round(piece, piece.view, stored)
        elif stored.dtype == torch.float32:
            store.read(piece.part, piece.start, stored)
        else:
            store.read(piece.part, piece.start, values[: piece.numel])
            _round(piece, values[: piece.numel], stored)

    with ThreadPoolExecutor(1, thread_name_prefix="aliquot-fsync") as disk:
        synced = []  # another thread fsyncs a file while the next file is written
        # Ranks begin with different files, because local file systems serialize writers of the same file.
        for pieces in work.pieces_of_files(spread=True):
            with ExitStack() as opened:
                file = opened.enter_context(TargetFile(pieces[0].entry.file, checksums))
                with Pipeline() as pipeline:
                    for piece in pieces:
                        stored = piece.direct
                        if stored is None:
                            stored = pipeline.buffer(piece)
                            read_piece(piece, stored)
                        pipeline.add(partial(file.write, piece.entry, piece.start, stored), partial(work.count, piece))
                opened.pop_all()  # the file stays open until it is synced
            synced.append(disk.submit(file.sync_and_close))
        for future in synced:
            future.result()
    return work.done_bytes


@dataclass(frozen=True)
class _Piece:
    """Elements [start, start + numel) of the tensor of `part`, transferred at once."""

    part: Part
    entry: TensorEntry
    start: int
    numel: int
    view: Tensor | None  # memory of the piece in the store; None: not available

    @property
    def direct(self) -> Tensor | None:
        """The memory of the piece in the store if the file has the same dtype, so that no buffer is needed."""
        return self.view if self.view is not None and self.view.dtype == self.entry.dtype else None


class _Transfer:
    """The parts to transfer, divided into pieces, and the number of bytes transferred."""

    def __init__(self, store: PartSource, maps: Maps, watch: Watch | None) -> None:
        pairs = [(part, maps[part.kind][part.name]) for part in store.parts() if part.kind in maps]
        self._pairs = sorted(pairs, key=lambda pair: (pair[1].file, pair[1].offset, pair[0].start))
        self._view = store.view if isinstance(store, ViewableStore) else lambda part: None
        self._watch = watch
        self._total_bytes = sum(part.numel * entry.itemsize for part, entry in pairs)
        self.done_bytes = 0

    def pieces_of_files(self, spread: bool = False) -> Iterator[list[_Piece]]:
        """Yield a list of pieces for each file, by ascending offset.

        `spread`: let each rank begin with a different file. A rank with later ranges of tensors begins with a later
        file.
        """
        files = [list(pairs) for _, pairs in groupby(self._pairs, key=lambda pair: pair[1].file)]
        if spread and files:
            position = sum(part.start for part, _ in self._pairs) / max(1, sum(entry.numel for _, entry in self._pairs))
            first = int(position * len(files))
            files = files[first:] + files[:first]
        for pairs in files:
            if pieces := [piece for part, entry in pairs for piece in self._pieces(part, entry)]:
                yield pieces

    def _pieces(self, part: Part, entry: TensorEntry) -> Iterator[_Piece]:
        view = self._view(part)
        start = part.start
        while start < part.stop:
            # Pieces end at multiples of PIECE_BYTES in the file: on page boundaries, and within one checksum block.
            room_bytes = PIECE_BYTES - entry.offset_of(start, 0) % PIECE_BYTES
            numel = min(part.stop - start, max(1, room_bytes // entry.itemsize))
            piece_view = None if view is None else view[start - part.start :][:numel]
            yield _Piece(part, entry, start, numel, piece_view)
            start += numel

    def count(self, piece: _Piece) -> None:
        self.done_bytes += piece.numel * piece.entry.itemsize
        if self._watch is not None:
            self._watch(Progress(self.done_bytes, self._total_bytes))


def _round(piece: _Piece, values: Tensor, stored: Tensor) -> None:
    """Round `values` to the dtype of the file. Raises UserError if a value becomes infinite, which leads to NaN."""
    stored.copy_(values)
    # Only float16 is checked: the range of the other dtypes suffices for all practical weights.
    if stored.dtype == torch.float16 and bool((stored.isinf() & values.isfinite()).any()):
        raise UsageError(
            f"{piece.part.name} has values of up to {float(values.abs().max()):.6g}, and float16 ends at 65504: choose"
            " bfloat16 or float32 (model.dtype of a run, --dtype of an export)"
        )


class Pipeline(AbstractContextManager["Pipeline"]):
    """Reads or writes pieces in threads, with at most `DEPTH` pieces in progress.

    `add` starts the `work` of a piece in a thread. The `end` of each piece runs in the calling thread, in the order of
    the pieces, so that only the calling thread accesses the store.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aliquot-io")
        self._in_progress: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._buffers: list[Tensor] = []
        self._pieces = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self._end_down_to(0)
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def buffer(self, piece: _Piece) -> Tensor:
        """Return a buffer for the next piece in the dtype of the file. Raises errors of earlier pieces.

        The buffer is valid until the `end` of the piece has run.
        """
        self._end_down_to(DEPTH - 1)
        index = self._pieces % DEPTH  # pieces end in order, so that the previous piece in this buffer has ended
        if not self._buffers:  # only copies between a GPU and pinned memory reach the full speed of the bus
            pinned = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._buffers = [
                torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
                if pinned
                else mapped_tensor(PIECE_BYTES, torch.uint8)
                for _ in range(DEPTH)
            ]
        return self._buffers[index].view(piece.entry.dtype)[: piece.numel]

    def add(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Start the next piece. Raises errors of earlier pieces."""
        self._end_down_to(DEPTH - 1)
        self._in_progress.append((self._threads.submit(work), end))
        self._pieces += 1

    def _end_down_to(self, count: int) -> None:
        while len(self._in_progress) > count:
            future, end = self._in_progress.popleft()
            future.result()
            end()
