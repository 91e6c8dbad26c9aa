"""An unnamed scratch file for state that does not fit into memory. The kernel frees its disk space at process exit.

Reads and writes bypass the page cache, because cached data would be overwritten before a second read. A `ScratchStream`
visits pieces of the file one after another: it reads pieces ahead of their use and writes them back in the background.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aliquot.core.errors import StorageError, storage_error
from aliquot.core.number_format import gib
from aliquot.offload.windows import AHEAD, STREAM_BUFFERS
from aliquot.tensor_io.range_io import mapped_tensor

THREADS = 4  # requests in flight: two reads, two writes
_MEASURED_PIECE_BYTES = 8 << 20
_MEASURED_PIECES = 24
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR)  # errors of file systems without support for a flag


class ScratchFile:
    """`size_bytes` of zeros in `directory`, with all disk space reserved. Several threads may use the file."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Create the file. Raises StorageError if the disk is too small or fails."""
        self.size_bytes = size_bytes
        self.read_bytes = self.written_bytes = 0
        self._directory = directory
        self._counting = threading.Lock()
        self._writes: deque[tuple[int, int, Future[None]]] = deque()  # (start, end) of writes that may be in flight
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = _nameless(directory)
        except OSError as error:
            message = f"shard.offload_directory: cannot write here: {error.strerror}"
            raise storage_error(message, error, directory) from None
        try:
            os.posix_fallocate(self._descriptor, 0, max(1, size_bytes))
        except OSError as error:
            os.close(self._descriptor)
            free = os.statvfs(directory)
            raise StorageError(
                f"shard.offload_directory: a rank needs {gib(size_bytes)} here, and"
                f" {gib(free.f_bavail * free.f_frsize)} are free ({error.strerror}):"
                " give another directory, or a larger shard.memory",
                directory,
            ) from None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aliquot-scratch")

    def read(self, offset: int, buffer: Tensor) -> Future[None]:
        """Start to read into `buffer`, uint8 on whole pages, which is filled when the future completes.

        Earlier writes to the same bytes finish first.
        """
        with self._counting:
            end = offset + buffer.nbytes
            earlier = [write for start, stop, write in self._writes if start < end and offset < stop]
        return self._threads.submit(self._move, os.preadv, offset, buffer, earlier)

    def write(self, offset: int, buffer: Tensor) -> Future[None]:
        """Start to write `buffer`, uint8 on whole pages, which must not change until the future completes."""
        write = self._threads.submit(self._move, os.pwritev, offset, buffer)
        with self._counting:
            while self._writes and self._writes[0][2].done():
                self._writes.popleft()
            self._writes.append((offset, offset + buffer.nbytes, write))
        return write

    def close(self) -> None:
        """Wait for the requests in flight, and free the disk space."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._descriptor)

    def _move(self, move: Callable[..., int], offset: int, buffer: Tensor, after: Sequence[Future[None]] = ()) -> None:
        for earlier in after:  # submitted earlier, so that threads already run these writes
            earlier.exception()
        reads, left = move is os.preadv, memoryview(buffer.numpy().data)
        while left:
            try:
                count = move(self._descriptor, [left], offset)
            except OSError as error:
                message = f"shard.offload: cannot {'read' if reads else 'write'} here: {error.strerror}"
                raise storage_error(message, error, self._directory) from None
            if not count:
                message = "shard.offload: the scratch file in this directory was truncated during use"
                raise StorageError(message, self._directory)
            left, offset = left[count:], offset + count
        with self._counting:
            self.read_bytes += buffer.nbytes if reads else 0
            self.written_bytes += 0 if reads else buffer.nbytes


def _nameless(directory: Path) -> int:
    """Create an unnamed file, with direct I/O if the file system supports it. Return its descriptor. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for extra in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        try:
            return os.open(directory, flags | extra, 0o600)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    descriptor, name = tempfile.mkstemp(prefix=".aliquot-offload-", dir=directory)
    Path(name).unlink()
    return descriptor


@dataclass(frozen=True)
class Move:
    """A request to read bytes [offset, offset + size) and write back the bytes from `written_from` on, if not None."""

    offset: int
    size: int
    written_from: int | None


class ScratchStream:
    """Iterate over pieces of a scratch file, and read pieces ahead. Iterating raises StorageError if the disk fails."""

    def __init__(self, scratch: ScratchFile, moves: Sequence[Move]) -> None:
        self._scratch = scratch
        self._to_read = deque(moves)
        largest = max((move.size for move in moves), default=0)
        self._free = [mapped_tensor(largest, torch.uint8) for _ in range(min(STREAM_BUFFERS, len(moves)))]
        self._reading: deque[tuple[Move, Tensor, Future[None]]] = deque()
        self._writing: deque[tuple[Tensor, Future[None]]] = deque()
        self._read_ahead()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each piece as uint8 [size]. The piece is written back when the caller requests the next piece."""
        try:
            while self._reading:
                move, buffer, read = self._reading.popleft()
                read.result()
                yield buffer[: move.size]
                if move.written_from is not None:
                    piece = buffer[move.written_from : move.size]
                    self._writing.append((buffer, self._scratch.write(move.offset + move.written_from, piece)))
                else:
                    self._free.append(buffer)
                self._read_ahead()
            while self._writing:
                self._writing.popleft()[1].result()
        finally:
            # Buffers must outlive the requests in flight, also after an error.
            for _, _, read in self._reading:
                read.exception()
            for _, written in self._writing:
                written.exception()

    def _read_ahead(self) -> None:
        while self._to_read and len(self._reading) < AHEAD:
            if not self._free:
                buffer, written = self._writing.popleft()
                written.result()
                self._free.append(buffer)
            move, buffer = self._to_read.popleft(), self._free.pop()
            self._reading.append((move, buffer, self._scratch.read(move.offset, buffer[: move.size])))


def disk_rate(directory: Path) -> float:
    """Measure the disk's bytes/s, reads plus writes, in the access pattern of an optimizer update.

    Raises StorageError if the disk fails. Takes 0.5 s on a disk of 0.7 GB/s.
    """
    with closing(ScratchFile(directory, _MEASURED_PIECES * _MEASURED_PIECE_BYTES)) as scratch:
        moves = [Move(at * _MEASURED_PIECE_BYTES, _MEASURED_PIECE_BYTES, 0) for at in range(_MEASURED_PIECES)]
        for _ in range(2):  # the first round allocates blocks; reads of unwritten blocks would not touch the disk
            before, began = scratch.read_bytes + scratch.written_bytes, time.perf_counter()
            for piece in ScratchStream(scratch, moves):
                piece[0] = 1
            took = time.perf_counter() - began
        return (scratch.read_bytes + scratch.written_bytes - before) / took
