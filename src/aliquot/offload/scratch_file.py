"""A nameless file for state that does not fit into memory; however the process ends, the disk space is free again.

Reads and writes bypass the page cache, which would take memory for data that is not read again before it is replaced.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from aliquot.core.errors import StorageError, storage_error

THREADS = 4  # requests in flight: two reads, two writes
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR)  # by a file system that does not know a flag


class ScratchFile:
    """`size_bytes` of zeros in `directory`, with all disk space reserved. Several threads may use it."""

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
            raise storage_error(
                f"shard.offload_directory: cannot write here: {error.strerror}", error, directory
            ) from None
        try:
            os.posix_fallocate(self._descriptor, 0, max(1, size_bytes))
        except OSError as error:
            os.close(self._descriptor)
            free = os.statvfs(directory)
            raise StorageError(
                f"shard.offload_directory: a rank needs {size_bytes / 2**30:.2f} GiB here, and"
                f" {free.f_bavail * free.f_frsize / 2**30:.2f} GiB are free ({error.strerror}):"
                " give another directory, or a larger shard.memory",
                directory,
            ) from None
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="aliquot-scratch")

    def read(self, offset: int, buffer: Tensor) -> Future[None]:
        """Start to fill `buffer`, uint8 on whole pages; it is full when the future has its result.

        Earlier writes to the same bytes take effect first.
        """
        with self._counting:
            end = offset + buffer.nbytes
            earlier = [write for start, stop, write in self._writes if start < end and offset < stop]
        return self._threads.submit(self._move, os.preadv, offset, buffer, earlier)

    def write(self, offset: int, buffer: Tensor) -> Future[None]:
        """Start to write `buffer`, uint8 on whole pages, which must not change until the future has its result."""
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

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        offset: int,
        buffer: Tensor,
        after: Sequence[Future[None]] = (),
    ) -> None:
        for earlier in after:  # submitted before, so that a thread already works on each of them
            earlier.exception()
        reads, left = move is os.preadv, memoryview(buffer.numpy().data)
        while left:
            try:
                count = move(self._descriptor, [left], offset)
            except OSError as error:
                what = "read here" if reads else "write here"
                raise storage_error(f"shard.offload: cannot {what}: {error.strerror}", error, self._directory) from None
            if not count:
                raise StorageError(
                    "shard.offload: the scratch file in this directory was truncated during use", self._directory
                )
            left, offset = left[count:], offset + count
        with self._counting:
            if reads:
                self.read_bytes += buffer.nbytes
            else:
                self.written_bytes += buffer.nbytes


def _nameless(directory: Path) -> int:
    """Return the descriptor of a new file, with direct I/O if the file system supports it. Raises OSError."""
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
