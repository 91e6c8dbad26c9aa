"""Publish a small text file in one piece: whoever reads it sees the old text or the new one, never a half."""

from __future__ import annotations

import os
from pathlib import Path


def publish_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, force it to the disk, rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
