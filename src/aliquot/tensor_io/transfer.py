"""Between files and a store of parts, in bounded pieces: `fill` reads what the store owns, `drain` writes it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from aliquot.core.errors import UsageError
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.mapped_memory import mapped_tensor
from aliquot.tensor_io.parts import Kind, Part, PartSource, PartStore, ViewableStore
from aliquot.tensor_io.piece_size import DEPTH, PIECE_BYTES
from aliquot.tensor_io.range_io import SourceFile, TargetFile, too_large_to_keep

THREADS = 4  # more gain nothing on a local disk; a network file system wants several requests at once

Maps = Mapping[Kind, Mapping[str, TensorEntry]]  # where the tensors of each kind lie; other kinds stay untouched


@dataclass(frozen=True)
class Progress:
    """How far this rank has come, in bytes of files."""

    done_bytes: int
    total_bytes: int
    elapsed_s: float


Watch = Callable[[Progress], None]  # called after every piece; what it raises ends the transfer


def fill(
    store: PartStore,
    maps: Maps,
    checksums: BlockChecksums | None = None,
    watch: Watch | None = None,
    check: Callable[[TensorEntry, int, Tensor], None] = lambda entry, start, values: None,
) -> int:
    """Read all parts of `store` whose kind is in `maps`; the bytes read. Raises UserError.

    `store` is used from the calling thread only, each part in order. `check` sees the values of each piece as the store
    holds them, flat, from element `start` of its tensor; an error that it raises ends the transfer.
    """
    work = _Transfer(store, maps, watch)
    values = mapped_tensor(PIECE_BYTES, torch.float32)  # a piece as fp32; as stored its values may take one byte each

    def land(piece: _Piece, stored: Tensor) -> None:
        if piece.view is None:
            as_fp32 = stored if stored.dtype == torch.float32 else values[: piece.numel].copy_(stored)
            check(piece.entry, piece.start, as_fp32)
            store.write(piece.part, piece.start, as_fp32)
        else:
            if piece.direct is None:
                piece.view.copy_(stored)
            check(piece.entry, piece.start, piece.view)
        work.count(piece)

    drop = too_large_to_keep(entry for of_kind in maps.values() for entry in of_kind.values())
    for pieces in work.by_file():
        with closing(SourceFile(pieces[0].entry, checksums, drop)) as file, Pipeline() as pipeline:
            for piece in pieces:
                stored = piece.direct
                if stored is None:
                    stored = _raw(pipeline, piece)
                file.announce(piece.entry, piece.start, piece.numel)
                pipeline.add(partial(file.read, piece.entry, piece.start, stored), partial(land, piece, stored))
    return work.done_bytes


def drain(store: PartSource, maps: Maps, checksums: BlockChecksums | None = None, watch: Watch | None = None) -> int:
    """Write all parts of `store` whose kind is in `maps`, and fsync; the bytes written. Raises UserError, also for
    values that the dtype of the file is too small for.

    `store` is used from the calling thread only, each part in order.
    """
    work = _Transfer(store, maps, watch)
    values = mapped_tensor(PIECE_BYTES, torch.float32)

    def take(piece: _Piece, stored: Tensor) -> None:
        if piece.view is not None:
            _round(piece, piece.view, stored)
        elif stored.dtype == torch.float32:
            store.read(piece.part, piece.start, stored)
        else:
            store.read(piece.part, piece.start, values[: piece.numel])
            _round(piece, values[: piece.numel], stored)

    with ThreadPoolExecutor(1, thread_name_prefix="aliquot-fsync") as disk:
        synced = []  # while one file is fsynced the next is written
        # Of two ranks that write to the same file, a local file system lets one wait for the other.
        for pieces in work.by_file(spread=True):
            file = TargetFile(pieces[0].entry.file, checksums)
            with file.closed_on_error(), Pipeline() as pipeline:
                for piece in pieces:
                    stored = piece.direct
                    if stored is None:
                        stored = _raw(pipeline, piece)
                        take(piece, stored)
                    pipeline.add(partial(file.write, piece.entry, piece.start, stored), partial(work.count, piece))
            synced.append(disk.submit(file.sync_and_close))
        for future in synced:
            future.result()
    return work.done_bytes


@dataclass(frozen=True)
class _Piece:
    """Elements [start, start + numel) of a part."""

    part: Part
    entry: TensorEntry
    start: int
    numel: int
    view: Tensor | None  # the piece itself, in the store

    @property
    def direct(self) -> Tensor | None:
        """The piece itself if it is held as it is stored: it needs no buffer."""
        return self.view if self.view is not None and self.view.dtype == self.entry.dtype else None


class _Transfer:
    """What is to be moved, and how much of it has been."""

    def __init__(self, store: PartSource, maps: Maps, watch: Watch | None) -> None:
        pairs = [(part, maps[part.kind][part.name]) for part in store.parts() if part.kind in maps]
        self._pairs = sorted(pairs, key=lambda pair: (pair[1].file, pair[1].offset, pair[0].start))
        self._view = store.view if isinstance(store, ViewableStore) else lambda part: None
        self._watch = watch
        self._began = time.perf_counter()
        self._total_bytes = sum(part.numel * entry.itemsize for part, entry in pairs)
        self.done_bytes = 0

    def by_file(self, spread: bool = False) -> Iterator[list[_Piece]]:
        """The pieces of each file, in the order in which they lie there.

        `spread`: ranks begin at different files, those with later ranges of tensors further on.
        """
        files = [list(pairs) for _, pairs in groupby(self._pairs, key=lambda pair: pair[1].file)]
        if spread and files:
            behind = sum(part.start for part, _ in self._pairs) / max(1, sum(entry.numel for _, entry in self._pairs))
            first = int(behind * len(files))
            files = files[first:] + files[:first]
        for pairs in files:
            if pieces := [piece for part, entry in pairs for piece in self._pieces(part, entry)]:
                yield pieces

    def _pieces(self, part: Part, entry: TensorEntry) -> Iterator[_Piece]:
        view = self._view(part)
        start = part.start
        while start < part.stop:
            # Pieces end where a multiple of their size lies in the file: whole pages, no block of checksums shared.
            room_bytes = PIECE_BYTES - (entry.offset + start * entry.itemsize) % PIECE_BYTES
            numel = min(part.stop - start, max(1, room_bytes // entry.itemsize))
            own = None if view is None else view[start - part.start :][:numel]
            yield _Piece(part, entry, start, numel, own)
            start += numel

    def count(self, piece: _Piece) -> None:
        self.done_bytes += piece.numel * piece.entry.itemsize
        if self._watch is not None:
            elapsed_s = time.perf_counter() - self._began
            self._watch(Progress(self.done_bytes, self._total_bytes, elapsed_s))


def _raw(pipeline: Pipeline, piece: _Piece) -> Tensor:
    """Memory for the piece as it is stored."""
    return pipeline.buffer().view(piece.entry.dtype)[: piece.numel]


def _round(piece: _Piece, values: Tensor, stored: Tensor) -> None:
    """Raises UserError where a number becomes infinite: a model with such a weight answers with nothing."""
    stored.copy_(values)
    if stored.dtype != torch.float16:  # the others hold whatever fp32 does, as far as weights go
        return
    if bool((stored.isinf() & values.isfinite()).any()):
        raise UsageError(
            f"{piece.part.name} has values of up to {float(values.abs().max()):.6g}, and float16 ends at 65504: choose"
            " bfloat16 or float32 (model.dtype of a run, --dtype of an export)"
        )


class Pipeline:
    """`add` starts the work of a piece in another thread; its `end` runs here, in the order of the pieces."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aliquot-io")
        self._under_way: deque[tuple[Future[None], Callable[[], None]]] = deque()
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(DEPTH)]
        self._pieces = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                self.flush()
        finally:
            self._threads.shutdown(wait=True, cancel_futures=True)

    def buffer(self) -> torch.Tensor:
        """`PIECE_BYTES` of uint8 for the next piece, free until that has ended. Raises what older pieces raised."""
        self._end_down_to(DEPTH - 1)
        index = self._pieces % DEPTH  # pieces end in order, so this one's last user has
        if not self._buffers[index].numel():
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                # To and from a GPU only pinned memory goes at the full speed of the bus.
                self._buffers[index] = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            else:
                self._buffers[index] = mapped_tensor(PIECE_BYTES, torch.uint8)
        return self._buffers[index]

    def add(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Raises what `work` or `end` of an older piece raised."""
        self._end_down_to(DEPTH - 1)
        self._under_way.append((self._threads.submit(work), end))
        self._pieces += 1

    def flush(self) -> None:
        """Return when all pieces have ended. Raises what one of them raised."""
        self._end_down_to(0)

    def _end_down_to(self, count: int) -> None:
        while len(self._under_way) > count:
            future, end = self._under_way.popleft()
            future.result()
            end()
