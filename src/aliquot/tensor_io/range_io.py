"""Read and write flat ranges of tensors in safetensors files: only these bytes, directly from or to tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import psutil
import torch

from aliquot.core.errors import WeightsFileError, reading, writing
from aliquot.core.small_files import open_regular
from aliquot.machine.memory import memory_limit
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.header import TensorEntry

BUFFER_BYTES = 8 << 20


class SourceFile(ExitStack):
    """A safetensors file that several threads read at once. Every method raises UserError.

    `entry`: any tensor of the file. `drop`: whether to remove bytes from the page cache after reading.
    """

    def __init__(self, entry: TensorEntry, checksums: BlockChecksums | None = None, drop: bool = False) -> None:
        super().__init__()
        self.path = entry.file
        self._checksums = checksums
        self._drop = drop
        with reading(self.path):
            self._file = self.enter_context(open_regular(self.path))
        size_bytes = os.fstat(self._file.fileno()).st_size
        if size_bytes != entry.file_bytes:
            self.close()
            raise WeightsFileError(f"{size_bytes} bytes where its header was read at {entry.file_bytes}", self.path)

    def announce(self, entry: TensorEntry, start: int, numel: int) -> None:
        """Ask the kernel to prefetch elements [start, start + numel) of a tensor into the page cache."""
        offset = entry.offset_of(start, numel)
        os.posix_fadvise(self._file.fileno(), offset, numel * entry.itemsize, os.POSIX_FADV_WILLNEED)

    def read(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        """Read elements [start, start + out.numel()) into `out`, a flat, contiguous CPU tensor of the stored dtype."""
        memory, offset = bytes_of(out), entry.offset_of(start, out.numel())
        done = 0
        while done < len(memory):
            with reading(self.path):
                count = os.preadv(self._file.fileno(), [memory[done:]], offset + done)
            if count == 0:
                raise WeightsFileError("the file became shorter while it was read", self.path)
            done += count
        if self._checksums is not None:
            self._checksums.add(self.path.name, offset, memory)
        if self._drop:
            os.posix_fadvise(self._file.fileno(), offset, len(memory), os.POSIX_FADV_DONTNEED)


class RangeReader(ExitStack):
    """Reads ranges of tensors one after another, and converts values to any float dtype. Only one file is open."""

    def __init__(self, checksums: BlockChecksums | None = None) -> None:
        super().__init__()
        self._checksums = checksums
        self._file: SourceFile | None = None
        self._buffer = torch.empty(BUFFER_BYTES, dtype=torch.uint8)  # takes memory at its first use

    def read(self, entry: TensorEntry, start: int, out: torch.Tensor) -> None:
        """Read elements [start, start + out.numel()) into `out`, a flat CPU tensor of any float dtype.

        Raises UserError if the file cannot be read, or if its size changed after its header was read.
        """
        file = self._open(entry)
        if out.dtype == entry.dtype:
            file.read(entry, start, out)
            return
        stored = self._buffer.view(entry.dtype)
        for first in range(0, out.numel(), stored.numel()):
            piece = stored[: out.numel() - first]
            file.read(entry, start + first, piece)
            out[first : first + piece.numel()] = piece

    def _open(self, entry: TensorEntry) -> SourceFile:
        if self._file is None or self._file.path != entry.file:
            self.close()
            self._file = self.enter_context(SourceFile(entry, self._checksums))
        return self._file


class TargetFile(ExitStack):
    """A safetensors file, already of its final size, that several threads write at once. Methods raise UserError.

    Written bytes are removed from the page cache after they reach the disk, because nobody reads them soon. Writes into
    pages that were just freed are also twice as fast.
    """

    def __init__(self, path: Path, checksums: BlockChecksums | None = None) -> None:
        super().__init__()
        self.path = path
        self._checksums = checksums
        with writing(path):
            self._file = self.enter_context(path.open("r+b", buffering=0))

    def write(self, entry: TensorEntry, start: int, values: torch.Tensor) -> None:
        """Write elements from `start` on; `values` is a flat, contiguous CPU tensor of the stored dtype."""
        memory, offset = bytes_of(values), entry.offset_of(start, values.numel())
        done = 0
        with writing(self.path):
            while done < len(memory):
                done += os.pwrite(self._file.fileno(), memory[done:], offset + done)
        if self._checksums is not None:
            self._checksums.add(self.path.name, offset, memory)
        # This call makes the kernel write the dirty pages now. Otherwise dirty pages reach the limit at which the
        # kernel slows down every writer, and a save takes twice as long (measured).
        os.posix_fadvise(self._file.fileno(), offset, len(memory), os.POSIX_FADV_DONTNEED)

    def sync_and_close(self) -> None:
        """Fsync and close the file."""
        with self, writing(self.path):  # a network file system may report a full disk only here
            os.fsync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a flat contiguous CPU tensor."""
    return tensor.view(torch.uint8).numpy().data


def mapped_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of zeros [numel] in an anonymous mapping, which is unmapped when the tensor is freed.

    On the heap, such temporary buffers would fragment the memory of a training step: the process would grow with every
    checkpoint.
    """
    if numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype)


def exceeds_page_cache(entries: Iterable[TensorEntry]) -> bool:
    """Return whether the files of `entries` together are larger than half of the available memory.

    Bytes of such files should be dropped from the page cache after use, because they would evict all other pages.
    """
    sizes = {entry.file: entry.file_bytes for entry in entries}
    return sum(sizes.values()) > min(psutil.virtual_memory().available, memory_limit()) // 2
