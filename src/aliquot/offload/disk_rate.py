"""How fast a directory's disk is for what is read, changed and written back."""

from __future__ import annotations

import time
from pathlib import Path

from aliquot.offload.scratch_file import ScratchFile
from aliquot.offload.stream import Move, Stream

_PIECE_BYTES = 8 << 20
_PIECES = 24


def disk_rate(directory: Path) -> float:
    """Bytes/s, read and written, in the pattern of an update. Takes half a second on a disk of 0.7 GB/s.

    Raises StorageError.
    """
    scratch = ScratchFile(directory, _PIECES * _PIECE_BYTES)
    try:
        moves = [Move(at * _PIECE_BYTES, _PIECE_BYTES, 0) for at in range(_PIECES)]
        for _ in range(2):  # what was never written is read from nowhere
            before, began = scratch.read_bytes + scratch.written_bytes, time.perf_counter()
            for piece in Stream(scratch, moves):
                piece[0] = 1
            took = time.perf_counter() - began
        return (scratch.read_bytes + scratch.written_bytes - before) / took
    finally:
        scratch.close()
