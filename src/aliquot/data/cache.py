"""The data cache: results published under the hash of all that they are made of, and hashes of source files.

A result is a directory that is written under another name and published by one rename, so that a directory that exists
is complete. Hashes of file contents are stored between runs, so that a run does not read terabytes again to find them
unchanged. A file counts as unchanged while its size, times and inode are the same. A file that was written a moment
before it was hashed is hashed again, because the clock of a file system may be too coarse to show a later change; its
ctime says when it was written, even if a program copied its mtime.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from aliquot.core.errors import storage_error
from aliquot.core.small_files import publish_text
from aliquot.tensor_io.publish import begin_alone, commit, sync


@contextmanager
def publishing(directory: Path) -> Iterator[Path]:
    """Yield an empty directory beside `directory`; when the block ends well, it is fsynced and gets the name.

    If another process published the same result first, theirs stays: the content is the same by construction.
    Raises UserError where the cache cannot be written; the block may raise its own.
    """
    try:
        beside = begin_alone(directory)
        beside.chmod(0o700)  # what a person trains on may be for nobody else's eyes
        _sweep(directory.parent, beside.stat().st_mtime)
    except OSError as error:
        told = f"cannot write the data cache: {error.strerror}; set data.cache_directory"
        raise storage_error(told, error, directory.parent) from error
    try:
        yield beside
        for path in beside.iterdir():
            sync(path)
        try:
            commit(beside, directory)
        except OSError:
            if not directory.is_dir():
                raise
    except OSError as error:
        told = f"cannot write the data cache: {error}; set data.cache_directory"
        raise storage_error(told, error, directory) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def digest_of_directory(directory: Path) -> str:
    """Hash of the names and bytes of the files in `directory`."""
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        total.update(f"{path.name}\0{digest_of_file(path)}\0".encode())
    return total.hexdigest()


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sweep(parent: Path, now: float) -> None:
    """Remove what killed processes left here more than a day ago. `now`: by the clock of the file system, which is not
    this machine's where others use it, too."""
    for path in parent.glob(".*"):
        with suppress(OSError):
            # A long tokenisation makes its files at the beginning, and writes to them to the end.
            if now - max(each.stat().st_mtime for each in (path, *path.iterdir())) > 86400:
                shutil.rmtree(path)


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
