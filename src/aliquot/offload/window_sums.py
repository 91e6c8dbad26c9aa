"""Sums on disk, window by window: one is open at a time, those that follow it are read ahead, those before written."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch
from torch import Tensor

from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.windows import AHEAD, SUMS_BUFFERS, paged
from aliquot.optim.squared_norm import block_squares
from aliquot.tensor_io.mapped_memory import mapped_tensor

Key = TypeVar("Key")  # of a window


class WindowSums(Generic[Key]):
    """`places`: of each window its offset in the scratch file and its elements. Used by one thread.

    Windows are opened in the same order in each round (micro-batch): what follows one is learnt in the first.
    """

    def __init__(self, scratch: ScratchFile, places: Mapping[Key, tuple[int, int]], dtype: torch.dtype) -> None:
        self._scratch = scratch
        self._places = places
        self._dtype = dtype
        self._follower: dict[Key, Key] = {}
        self._open: tuple[Key, Tensor] | None = None
        self._ahead: deque[tuple[Key, Tensor, Future[None]]] = deque()
        self._writing: dict[Key, tuple[Tensor, Future[None]]] = {}  # in the order in which they were begun
        largest = max((paged(numel * dtype.itemsize) for _, numel in places.values()), default=0)
        self._free = [mapped_tensor(largest, torch.uint8) for _ in range(SUMS_BUFFERS)]
        self.squares: dict[Key, list[float]] = {}  # of each window as it was closed last, as block_squares() has them

    def open(self, key: Key, first: bool) -> Tensor:
        """The sums of window `key`, flat, to be changed in place until another is opened. `first`: what they were
        before is of no use, and they hold anything. Raises StorageError."""
        if self._open is not None and self._open[0] == key:
            return self._values(*self._open)
        before = None if self._open is None else self._open[0]
        self._close()
        if before is not None:
            self._follower[before] = key
        self._open = (key, self._buffer() if first else self._read(key))
        if not first:
            self._read_on(key)
        return self._values(*self._open)

    def settle(self) -> None:
        """Return when every window is on disk. Raises StorageError."""
        self._close()
        self._forget_ahead()
        while self._writing:
            self._end_oldest()

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
        if not self._ahead or self._ahead[0][0] != key:
            self._forget_ahead()
            self._begin(key)
        _, buffer, arrives = self._ahead.popleft()
        arrives.result()
        return buffer

    def _read_on(self, key: Key) -> None:
        last = self._ahead[-1][0] if self._ahead else key
        while len(self._ahead) < AHEAD and last in self._follower:
            last = self._follower[last]
            if last == key:  # there are fewer windows than are read ahead
                return
            self._begin(last)

    def _begin(self, key: Key) -> None:
        while key in self._writing:
            self._end_oldest()
        buffer = self._buffer()
        self._ahead.append((key, buffer, self._scratch.read(self._places[key][0], self._pages(key, buffer))))

    def _buffer(self) -> Tensor:
        if not self._free:
            self._end_oldest()
        return self._free.pop()

    def _end_oldest(self) -> None:
        key = next(iter(self._writing))
        buffer, written = self._writing.pop(key)
        self._free.append(buffer)
        written.result()

    def _forget_ahead(self) -> None:
        while self._ahead:
            _, buffer, arrives = self._ahead.popleft()
            arrives.exception()
            self._free.append(buffer)
