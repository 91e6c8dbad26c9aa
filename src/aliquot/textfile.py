"""Publish a small file in one piece: whoever reads it sees the old content or the new one, never a half.

And what a clone without git-lfs has in the place of a file.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LFS_POINTER = "a git-lfs pointer, not the file itself: fetch it first (git lfs pull)"


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins so is the three lines that git-lfs leaves of a file that it has not fetched."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def publish_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, force it to the disk, rename it into place."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:  # a full disk is not made fuller
        with suppress(OSError):
            beside.unlink()
        raise
