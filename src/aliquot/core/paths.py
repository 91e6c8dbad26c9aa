"""Paths as people write them."""

from __future__ import annotations

import os
from pathlib import Path


def looks_local(name: str) -> bool:
    """Whether `name`, of a model, can only be a path: a hub id is `owner/name`."""
    return with_home(name).exists() or name.startswith((".", "/", "~")) or name.count("/") != 1


def with_home(path: str | Path) -> Path:
    """`path` with ~ and ~NAME replaced; as it stands, so that it is told as missing, where nobody has that name."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_root(configured: Path | None = None) -> Path:
    """`configured`, else $ALIQUOT_CACHE, else ~/.cache/aliquot."""
    return with_home(configured or os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").absolute()
