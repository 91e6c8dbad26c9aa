"""Read flat ranges of tensors: exactly the bytes asked for, straight into the memory given where the dtypes agree."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

import torch

from aliquot.core.errors import WeightsFileError, reading
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.header import TensorEntry

BUFFER_BYTES = 8 << 20


class SourceFile:
    """A file whose header was read before, open for reading by several threads at once.

    `checksums`, if given, collects the checksums of all bytes read. `drop`: what was read leaves the page cache.
    Every method raises UserError: cannot read, or the size is not what it was when the header was read.
    """

    def __init__(self, entry: TensorEntry, checksums: BlockChecksums | None = None, drop: bool = False) -> None:
        self.path = entry.file
        self._checksums = checksums
        self._drop = drop
        with reading(self.path):
            self._descriptor = os.open(self.path, os.O_RDONLY)
        size_bytes = os.fstat(self._descriptor).st_size
        if size_bytes != entry.file_bytes:
            self.close()
            raise WeightsFileError(f"{size_bytes} bytes where its header was read at {entry.file_bytes}", self.path)

    def announce(self, entry: TensorEntry, start: int, numel: int) -> None:
        """These elements are to be read soon: the disk may begin."""
        os.posix_fadvise(
            self._descriptor, entry.offset + start * entry.itemsize, numel * entry.itemsize, os.POSIX_FADV_WILLNEED
        )

    def read(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        """Elements [start, start + out.numel()) into flat, contiguous CPU `out` of the stored dtype."""
        memory, offset = bytes_of(out), offset_of(entry, start, out)
        done = 0
        while done < len(memory):
            with reading(self.path):
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            if count == 0:
                raise WeightsFileError("the file became shorter while it was read", self.path)
            done += count
        if self._checksums is not None:
            self._checksums.add(self.path.name, offset, memory)
        if self._drop:
            os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        os.close(self._descriptor)


class RangeReader:
    """Reads ranges one after the other, in any float dtype; one file is open at a time."""

    def __init__(self, checksums: BlockChecksums | None = None) -> None:
        self._checksums = checksums
        self._file: SourceFile | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._close()

    def read(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        """Elements [start, start + out.numel()) into `out`, flat and contiguous in CPU memory, of any float dtype.

        Raises UserError: cannot read, or the file is not what it was when its header was read.
        """
        offset_of(entry, start, out)
        file = self._open(entry)
        if out.dtype == entry.dtype:
            file.read(entry, start, out)
            return
        if not self._buffer.numel():
            self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
        stored = self._buffer.view(entry.dtype)
        for first in range(0, out.numel(), stored.numel()):
            piece = stored[: out.numel() - first]
            file.read(entry, start + first, piece)
            out[first : first + piece.numel()] = piece

    def _open(self, entry: TensorEntry) -> SourceFile:
        if self._file is None or self._file.path != entry.file:
            self._close()
            self._file = SourceFile(entry, self._checksums)
        return self._file

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None


def offset_of(entry: TensorEntry, start: int, values: torch.Tensor) -> int:
    """Where in the file elements [start, start + values.numel()) begin. Raises ValueError if the tensor has not all."""
    if start < 0 or start + values.numel() > entry.numel:
        raise ValueError(f"[{start}, {start + values.numel()}) is not inside {entry.name}, {entry.numel} elements")
    return entry.offset + start * entry.itemsize


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a flat contiguous CPU tensor."""
    return tensor.view(torch.uint8).numpy().data
