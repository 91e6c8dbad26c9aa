"""Publish a small file in one piece: whoever reads it sees the old content or the new one, never a half."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
