"""Hashes of the content of files, kept from run to run: terabytes are not read again to find that nothing has changed.

A file is taken for unchanged while its size, times and inode are. One that was written a moment before it was hashed is
hashed again: a file system's clock may be too coarse to show that it has changed since.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot.data.cache import digest_of_file
from aliquot.textfile import publish_text

_COARSEST_CLOCK_S = 2.0


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """SHA-256 of each. Raises OSError where one cannot be read; where `cache` cannot be written nothing is kept."""
    places = [str(file.absolute()) for file in files]
    known_in = cache / "digests" / f"{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:32]}.json"
    now_ns, states = time.time_ns(), [_state(file) for file in files]
    known = _known(known_in)
    found = {place: known[place][1] for place, state in zip(places, states, strict=True) if [state] == known[place][:1]}
    changed = [(place, file) for place, file in zip(places, files, strict=True) if place not in found]
    if changed:
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            contents = pool.map(digest_of_file, [file for _, file in changed])
            found.update(zip((place for place, _ in changed), contents, strict=True))
        settled_ns = now_ns - _COARSEST_CLOCK_S * 1e9
        kept = {place: (state, found[place]) for place, state in zip(places, states, strict=True)
                if max(state[1:3]) < settled_ns}  # fmt: skip
        with suppress(OSError):
            known_in.parent.mkdir(parents=True, exist_ok=True)
            publish_text(known_in, json.dumps(kept))
    return [found[place] for place in places]


def _state(file: Path) -> list[int]:
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _known(file: Path) -> defaultdict[str, list[Any]]:
    """[state, digest] by place; [] for what is not kept."""
    known: defaultdict[str, list[Any]] = defaultdict(list)
    with suppress(OSError, ValueError, TypeError):
        known.update(json.loads(file.read_text(encoding="utf-8")))
    return known
