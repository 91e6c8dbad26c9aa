"""A file for what does not fit into memory. It has no name: however its process ends, the disk has its room again.

Reads and writes go around the page cache, which is memory, too, and would be filled with what nobody reads twice.
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

THREADS = 4  # requests under way: two to read, two to write
_REFUSED = (errno.EOPNOTSUPP, errno.EINVAL, errno.EISDIR)  # by file systems that do not know of what is asked


class ScratchFile:
    """`size_bytes` of zeros in `directory`, all of it reserved. Used from several threads.

    Raises StorageError where there is no room, or the disk fails.
    """

    def __init__(self, directory: Path, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.read_bytes = self.written_bytes = 0
        self._directory = directory
        self._counting = threading.Lock()
        self._writes: deque[tuple[int, int, Future[None]]] = deque()  # (start, end) of those that may be under way
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
        """Begin to fill `buffer`, uint8 on whole pages: it has its bytes, what was to be written there before, when the
        future has its result."""
        with self._counting:
            end = offset + buffer.nbytes
            before = [write for start, stop, write in self._writes if start < end and offset < stop]
        return self._threads.submit(self._move, os.preadv, offset, buffer, before)

    def write(self, offset: int, buffer: Tensor) -> Future[None]:
        """Begin to write `buffer`, uint8 on whole pages, which stays as it is until the future has its result."""
        write = self._threads.submit(self._move, os.pwritev, offset, buffer)
        with self._counting:
            while self._writes and self._writes[0][2].done():
                self._writes.popleft()
            self._writes.append((offset, offset + buffer.nbytes, write))
        return write

    def close(self) -> None:
        """Waits for what is under way, and gives the room back."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        os.close(self._descriptor)

    def _move(
        self,
        move: Callable[[int, list[memoryview], int], int],
        offset: int,
        buffer: Tensor,
        after: Sequence[Future[None]] = (),
    ) -> None:
        for earlier in after:  # they were begun before, so that a thread has them already
            earlier.exception()
        reads, left = move is os.preadv, memoryview(buffer.numpy().data)
        while left:
            try:
                count = move(self._descriptor, [left], offset)
            except OSError as error:
                what = "read what lies here" if reads else "write here"
                raise storage_error(f"shard.offload: cannot {what}: {error.strerror}", error, self._directory) from None
            if not count:
                raise StorageError(
                    "shard.offload: what lies here has been cut short while it was used", self._directory
                )
            left, offset = left[count:], offset + count
        with self._counting:
            if reads:
                self.read_bytes += buffer.nbytes
            else:
                self.written_bytes += buffer.nbytes


def _nameless(directory: Path) -> int:
    """A descriptor of a new file, past the page cache where the file system can. Raises OSError."""
    flags = os.O_RDWR | os.O_CLOEXEC
    for more in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        try:
            return os.open(directory, flags | more, 0o600)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
    descriptor, name = tempfile.mkstemp(prefix=".aliquot-offload-", dir=directory)
    Path(name).unlink()
    return descriptor
