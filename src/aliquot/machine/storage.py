"""The directory of a path that does not exist yet, and the speed at which a file system stores checkpoints."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

PIECE_BYTES = 4 << 20  # of one write
_PIECES = 4


def written_bytes_per_s(directory: Path, pieces: int = _PIECES) -> float | None:
    """Measure writes like those of checkpoints: page cache, then fsync. None if the directory cannot be written."""
    piece, fastest = os.urandom(PIECE_BYTES), 0.0
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            for _ in range(2):  # the faster of two writes, because other processes may write
                file.seek(0)
                began = time.perf_counter()
                for _ in range(pieces):
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
                fastest = max(fastest, pieces * PIECE_BYTES / (time.perf_counter() - began))
    except OSError:  # the run itself reports the error
        return None
    return fastest


def nearest_directory(directory: Path) -> Path:
    """Return the directory itself, or its nearest parent that exists."""
    absolute = directory.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())
