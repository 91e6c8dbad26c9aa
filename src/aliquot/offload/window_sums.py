"""Gradient sums on disk, in windows. One window at a time is open for changes; the next windows are read ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.windows import AHEAD, SUMS_BUFFERS, paged
from aliquot.optim.gradient_norm import block_squares
from aliquot.tensor_io.range_io import mapped_tensor

Key = TypeVar("Key")  # names a window


class WindowSums(Generic[Key]):
    """Gradient sums in a scratch file. Only one thread may use them.

    Each micro-batch opens the windows in the same order. The first micro-batch records this order, so that later
    micro-batches can read ahead.
    """

    def __init__(self, scratch: ScratchFile, places: Mapping[Key, tuple[int, int]], dtype: torch.dtype) -> None:
        """`places`: by window, (offset in the scratch file, number of elements)."""
        self._scratch = scratch
        self._places = places
        self._dtype = dtype
        self._successor: dict[Key, Key] = {}
        self._open: tuple[Key, Tensor] | None = None
        self._reading: deque[tuple[Key, Tensor, Future[None]]] = deque()
        self._writing: dict[Key, tuple[Tensor, Future[None]]] = {}  # the oldest write first
        largest = max((paged(numel * dtype.itemsize) for _, numel in places.values()), default=0)
        self._free = [mapped_tensor(largest, torch.uint8) for _ in range(SUMS_BUFFERS)]
        self.squares: dict[Key, list[float]] = {}  # block_squares() of each window when it was last closed

    def open(self, key: Key, overwrite: bool) -> Tensor:
        """Return the flat sums of a window. The caller may change them in place until it opens another window.

        With `overwrite`, the sums are not read from disk, and the memory is uninitialized. Raises StorageError.
        """
        if self._open is not None and self._open[0] == key:
            return self._values(*self._open)
        previous = None if self._open is None else self._open[0]
        self._close()
        if previous is not None:
            self._successor[previous] = key
        self._open = (key, self._take_buffer() if overwrite else self._read(key))
        if not overwrite:
            self._read_ahead(key)
        return self._values(*self._open)

    def flush(self) -> None:
        """Write all changes, and return when every window is on disk. Raises StorageError."""
        self._close()
        self._drop_reads()
        while self._writing:
            self._end_oldest_write()

    def _values(self, key: Key, buffer: Tensor) -> Tensor:
        return buffer[: self._places[key][1] * self._dtype.itemsize].view(self._dtype)

    def _pages(self, key: Key, buffer: Tensor) -> Tensor:
        return buffer[: paged(self._places[key][1] * self._dtype.itemsize)]

    def _close(self) -> None:
        if self._open is not None:
            key, buffer = self._open
            self._open = None
            self.squares[key] = block_squares(self._values(key, buffer))
            self._writing[key] = (buffer, self._scratch.write(self._places[key][0], self._pages(key, buffer)))

    def _read(self, key: Key) -> Tensor:
        if not self._reading or self._reading[0][0] != key:
            self._drop_reads()
            self._start_read(key)
        _, buffer, read = self._reading.popleft()
        read.result()
        return buffer

    def _read_ahead(self, key: Key) -> None:
        last = self._reading[-1][0] if self._reading else key
        while len(self._reading) < AHEAD and last in self._successor:
            last = self._successor[last]
            if last == key:  # all windows are in memory already
                return
            self._start_read(last)

    def _start_read(self, key: Key) -> None:
        while key in self._writing:
            self._end_oldest_write()
        buffer = self._take_buffer()
        self._reading.append((key, buffer, self._scratch.read(self._places[key][0], self._pages(key, buffer))))

    def _take_buffer(self) -> Tensor:
        if not self._free:
            self._end_oldest_write()
        return self._free.pop()

    def _end_oldest_write(self) -> None:
        key = next(iter(self._writing))
        buffer, written = self._writing.pop(key)
        self._free.append(buffer)
        written.result()

    def _drop_reads(self) -> None:
        while self._reading:
            _, buffer, read = self._reading.popleft()
            read.exception()
            self._free.append(buffer)
