"""Read flat ranges of tensors: exactly the bytes asked for, converted through one bounded buffer."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import torch

from aliquot.errors import UserError
from aliquot.ranges.checksums import BlockChecksums
from aliquot.ranges.failures import reading
from aliquot.ranges.header import TensorEntry

BUFFER_BYTES = 8 << 20


class RangeReader:
    """Reads ranges; one file is open at a time, so ask in the order of the files.

    `checksums`, if given, collects the checksums of all bytes read. `read_bytes` counts them.
    """

    def __init__(self, checksums: BlockChecksums | None = None) -> None:
        self.read_bytes = 0
        self._checksums = checksums
        self._entry: TensorEntry | None = None  # of the file that is open
        self._descriptor = -1
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def read(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        """Elements [start, start + out.numel()) into `out`, flat and contiguous in CPU memory, of any float dtype.

        Raises UserError: cannot read, or the file is not what it was when its header was read.
        """
        if start < 0 or start + out.numel() > entry.numel:
            raise ValueError(f"[{start}, {start + out.numel()}) is not inside {entry.name}, {entry.numel} elements")
        self._open(entry)
        offset = entry.offset + start * entry.itemsize
        if out.dtype == entry.dtype:
            self._fill(entry, offset, bytes_of(out))
            return
        if not self._buffer.numel():
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        stored = self._buffer.view(entry.dtype)
        for first in range(0, out.numel(), stored.numel()):
            piece = stored[: out.numel() - first]
            self._fill(entry, offset + first * entry.itemsize, bytes_of(piece))
            out[first : first + piece.numel()] = piece

    def _fill(self, entry: TensorEntry, offset: int, memory: memoryview) -> None:
        done = 0
        while done < len(memory):
            with reading(entry.file):
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise UserError("the file became shorter while it was read", entry.file)
            done += count
        self.read_bytes += done
        if self._checksums is not None:
            self._checksums.add(entry.file.name, offset, memory)

    def _open(self, entry: TensorEntry) -> None:
        if self._entry is not None and self._entry.file == entry.file:
            return
        self._close()
        with reading(entry.file):
            self._descriptor = os.open(entry.file, os.O_RDONLY)
            size_bytes = os.fstat(self._descriptor).st_size
        self._entry = entry
        if size_bytes != entry.file_bytes:
            raise UserError(f"{size_bytes} bytes where its header was read at {entry.file_bytes}", entry.file)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor, self._entry = -1, None


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor."""
    return tensor.view(torch.uint8).numpy().data
