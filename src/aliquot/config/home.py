"""Paths as people write them."""

from __future__ import annotations

from pathlib import Path


def with_home(path: str | Path) -> Path:
    """`path` with ~ and ~NAME replaced; as it stands, so that it is told as missing, where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)
