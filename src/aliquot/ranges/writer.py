"""Write flat ranges of tensors into pre-laid-out files: the mirror of the reader."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from aliquot.ranges.checksums import BlockChecksums
from aliquot.ranges.failures import writing
from aliquot.ranges.header import TensorEntry
from aliquot.ranges.reader import BUFFER_BYTES, bytes_of


class RangeWriter:
    """Writes ranges; one file is open at a time, and is fsynced when the next one or the end comes.

    `checksums`, if given, collects the checksums of all bytes written. `written_bytes` counts them.
    """

    def __init__(self, checksums: BlockChecksums | None = None) -> None:
        self.written_bytes = 0
        self._checksums = checksums
        self._file: Path | None = None
        self._descriptor = -1
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close(sync=error is None)

    def write(self, entry: TensorEntry, start: int, values: torch.Tensor) -> None:
        """Elements [start, start + values.numel()) from flat, contiguous CPU `values`, rounded to nearest even.

        Raises UserError: disk full, no permission, any other failure to write.
        """
        if start < 0 or start + values.numel() > entry.numel:
            raise ValueError(f"[{start}, {start + values.numel()}) is not inside {entry.name}, {entry.numel} elements")
        self._open(entry.file)
        offset = entry.offset + start * entry.itemsize
        if values.dtype == entry.dtype:
            self._put(offset, bytes_of(values))
            return
        if not self._buffer.numel():
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        stored = self._buffer.view(entry.dtype)
        for first in range(0, values.numel(), stored.numel()):
            piece = stored[: values.numel() - first]
            piece.copy_(values[first : first + piece.numel()])
            self._put(offset + first * entry.itemsize, bytes_of(piece))

    def _put(self, offset: int, memory: memoryview) -> None:
        done = 0
        with writing(self._file):
            while done < len(memory):
                done += os.pwrite(self._descriptor, memory[done:], offset + done)
        self.written_bytes += done
        if self._checksums is not None and self._file is not None:
            self._checksums.add(self._file.name, offset, memory)

    def _open(self, file: Path) -> None:
        if self._file == file:
            return
        self._close(sync=True)
        with writing(file):
            self._descriptor = os.open(file, os.O_WRONLY)
        self._file = file

    def _close(self, sync: bool) -> None:
        if self._descriptor < 0:
            return
        descriptor, file = self._descriptor, self._file
        self._descriptor, self._file = -1, None
        try:
            if sync:
                with writing(file):  # a network file system may tell of a full disk only here
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
