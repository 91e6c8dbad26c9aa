"""Visit pieces of a scratch file one after another: read ahead, hand out for changes in place, write behind."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.windows import AHEAD, STREAM_BUFFERS
from aliquot.tensor_io.mapped_memory import mapped_tensor

_MEASURED_PIECE_BYTES = 8 << 20
_MEASURED_PIECES = 24


@dataclass(frozen=True)
class Move:
    """Read bytes [offset, offset + size), and write those from `written_from` on back; None: write nothing back."""

    offset: int
    size: int
    written_from: int | None


class ScratchStream:
    """An iterator over pieces, which begins to read at once. Iterating raises StorageError if the disk fails."""

    def __init__(self, scratch: ScratchFile, moves: Sequence[Move]) -> None:
        self._scratch = scratch
        self._to_read = deque(moves)
        largest = max((move.size for move in moves), default=0)
        self._free = [mapped_tensor(largest, torch.uint8) for _ in range(min(STREAM_BUFFERS, len(moves)))]
        self._reading: deque[tuple[Move, Tensor, Future[None]]] = deque()
        self._writing: deque[tuple[Tensor, Future[None]]] = deque()
        self._read_ahead()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield each piece as uint8 [size]; it is written back when the next one is asked for."""
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
    """Measure bytes/s, read and written, in the access pattern of an update. Takes 0.5 s on a disk of 0.7 GB/s.

    Raises:
        StorageError: the disk fails, or is full.
    """
    scratch = ScratchFile(directory, _MEASURED_PIECES * _MEASURED_PIECE_BYTES)
    try:
        moves = [Move(at * _MEASURED_PIECE_BYTES, _MEASURED_PIECE_BYTES, 0) for at in range(_MEASURED_PIECES)]
        for _ in range(2):  # the first round allocates blocks; reading unwritten ones would not touch the disk
            before, began = scratch.read_bytes + scratch.written_bytes, time.perf_counter()
            for piece in ScratchStream(scratch, moves):
                piece[0] = 1
            took = time.perf_counter() - began
        return (scratch.read_bytes + scratch.written_bytes - before) / took
    finally:
        scratch.close()
