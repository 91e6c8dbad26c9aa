"""Paths as people write them, and the cache directory."""

from __future__ import annotations

import os
from pathlib import Path


def with_home(path: str | Path) -> Path:
    """Replace ~ and ~NAME in `path`; return an unknown ~NAME unchanged, so that an error can name it as missing."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def looks_local(model: str) -> bool:
    """Return whether the name of a model can only be a path: a hub id is `owner/name`."""
    return with_home(model).exists() or model.startswith((".", "/", "~")) or model.count("/") != 1


def cache_root(configured: Path | None = None) -> Path:
    """Return the directory of tokens, plans and measured rates: `configured`, $ALIQUOT_CACHE or ~/.cache/aliquot."""
    return with_home(configured or os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").absolute()
