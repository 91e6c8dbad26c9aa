"""Write flat ranges of tensors into pre-laid-out files: the mirror of the reader."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from aliquot.core.errors import writing
from aliquot.tensor_io.checksums import BlockChecksums
from aliquot.tensor_io.header import TensorEntry
from aliquot.tensor_io.reader import bytes_of, offset_of


class TargetFile:
    """A file that is laid out already, open for writing by several threads at once.

    `checksums`, if given, collects the checksums of all bytes written. What is written leaves the page cache once the
    disk has it: nobody reads it soon, and writing into pages that were just freed is twice as fast. Every method raises
    UserError: disk full, no permission, any other failure to write.
    """

    def __init__(self, path: Path, checksums: BlockChecksums | None = None) -> None:
        self.path = path
        self._checksums = checksums
        with writing(path):
            self._descriptor = os.open(path, os.O_WRONLY)

    def write(self, entry: TensorEntry, start: int, values: torch.Tensor) -> None:
        """Elements [start, start + values.numel()) from flat, contiguous CPU `values` of the stored dtype."""
        memory, offset = bytes_of(values), offset_of(entry, start, values)
        done = 0
        with writing(self.path):
            while done < len(memory):
                done += os.pwrite(self._descriptor, memory[done:], offset + done)
        if self._checksums is not None:
            self._checksums.add(self.path.name, offset, memory)
        # Dirty pages go to the disk from now on. Left to pile up, they reach the limit at which the kernel slows down
        # every writer: measured, a save then takes twice as long.
        os.posix_fadvise(self._descriptor, offset, len(memory), os.POSIX_FADV_DONTNEED)

    def sync_and_close(self) -> None:
        """Return when the disk has it all."""
        with self.closed_on_error(), writing(self.path):  # a network file system may tell of a full disk only here
            os.fsync(self._descriptor)
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(self._descriptor)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Give the file back if what is done within raises."""
        try:
            yield
        except BaseException:
            os.close(self._descriptor)
            raise
