"""Where everything is kept that could be found again: tokens, plans, what this machine can do."""

from __future__ import annotations

import os
from pathlib import Path

from aliquot.config.home import with_home


def cache_root(configured: Path | None = None) -> Path:
    """`configured`, else $ALIQUOT_CACHE, else ~/.cache/aliquot."""
    return with_home(configured or os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").absolute()
