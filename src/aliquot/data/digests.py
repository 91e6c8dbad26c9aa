"""Hashes of the content of files, kept from run to run: terabytes are not read again to find that nothing has changed.

A file is taken for unchanged while its size, times and inode are. One that was written a moment before it was hashed is
hashed again: a file system's clock may be too coarse to show that it has changed since. When it was written its ctime
tells, whatever copied its mtime.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from aliquot.core.small_files import publish_text
from aliquot.data.cache import digest_of_file

_COARSEST_CLOCK_S = 2.0


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """SHA-256 of each. Raises OSError where one cannot be read; where `cache` cannot be written nothing is kept."""
    places = [str(file.absolute()) for file in files]
    known_in = cache / "digests" / f"{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:32]}.json"
    now_ns = _now_ns(known_in.parent)  # before anything is looked at
    found_there = [file.stat() for file in files]
    states = [_state(each) for each in found_there]
    known = _known(known_in)
    found = {place: known[place][1] for place, state in zip(places, states, strict=True) if [state] == known[place][:1]}
    changed = [(place, file) for place, file in zip(places, files, strict=True) if place not in found]
    if changed:
        with ThreadPoolExecutor() as pool:  # hashing releases the interpreter lock
            contents = pool.map(digest_of_file, [file for _, file in changed])
            found.update(zip((place for place, _ in changed), contents, strict=True))
        kept = {
            place: (state, found[place])
            for place, state, each in zip(places, states, found_there, strict=True)
            if each.st_ctime_ns < now_ns.get(each.st_dev, now_ns[None]) - _COARSEST_CLOCK_S * 1e9
        }
        with suppress(OSError):
            publish_text(known_in, json.dumps(kept))
    return [found[place] for place in places]


def _now_ns(directory: Path) -> dict[int | None, int]:
    """By the clocks of file systems by their devices: of that which has `directory`; any other's is taken for this
    machine's (None)."""
    now: dict[int | None, int] = {None: time.time_ns()}
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            made = os.fstat(file.fileno())
        now[made.st_dev] = made.st_ctime_ns
    return now


def _state(found: os.stat_result) -> list[int]:
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _known(file: Path) -> defaultdict[str, list[Any]]:
    """[state, digest] by place; [] for what is not kept."""
    known: defaultdict[str, list[Any]] = defaultdict(list)
    with suppress(OSError, ValueError, TypeError):
        known.update(json.loads(file.read_text(encoding="utf-8")))
    return known
