"""The data cache: directories named by the hash of their inputs, and stored hashes of source files.

A cached directory is written under a temporary name and published by one rename, so that every published directory is
complete. The cache also stores hashes of file contents, so that a later run need not read terabytes to find that the
files are unchanged. A file counts as unchanged while its size, times and inode are the same.

The hash of a file that was written just before hashing is not stored. The clock of the file system may be too coarse
to show that the file has changed again. The ctime tells when a file was written, even if a program copied the mtime.
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

_SAMPLE_BYTES = 1 << 16


@contextmanager
def publishing(directory: Path) -> Iterator[Path]:
    """Yield an empty directory next to `directory`; if the block succeeds, sync the directory and rename it.

    If another process publishes `directory` first, the published one stays, because both have the same content.
    """
    try:
        partial = begin_alone(directory)
        partial.chmod(0o700)  # training data may be confidential
        _sweep(directory.parent, partial.stat().st_mtime)
    except OSError as error:
        message = f"cannot write the data cache: {error.strerror}; set data.cache_directory"
        raise storage_error(message, error, directory.parent) from error
    try:
        yield partial
        for path in partial.iterdir():
            sync(path)
        try:
            commit(partial, directory)
        except OSError:
            if not directory.is_dir():
                raise
    except OSError as error:
        message = f"cannot write the data cache: {error}; set data.cache_directory"
        raise storage_error(message, error, directory) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def digest_of_directory(directory: Path) -> str:
    """Return a hash of the names and contents of the files in `directory`."""
    total = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        total.update(f"{path.name}\0{digest_of_file(path)}\0".encode())
    return total.hexdigest()


def digest_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sampled_digest(path: Path) -> str:
    """Return a hash of the size of a file and of its beginning and end, without reading all of it."""
    with path.open("rb") as file:
        size_bytes = path.stat().st_size
        total = hashlib.sha256(f"{size_bytes}\0".encode())
        total.update(file.read(_SAMPLE_BYTES))
        file.seek(max(0, size_bytes - _SAMPLE_BYTES))
        total.update(file.read(_SAMPLE_BYTES))
    return total.hexdigest()


def _sweep(parent: Path, now: float) -> None:
    """Remove temporary directories that killed processes left more than a day ago.

    `now` comes from the clock of the file system, which may differ from the clock of this machine.
    """
    for path in parent.glob(".*"):
        with suppress(OSError):
            # The files count, too: a long tokenisation changes its files, but not its directory, until it ends.
            if now - max(file.stat().st_mtime for file in (path, *path.iterdir())) > 86400:
                shutil.rmtree(path)


_COARSEST_CLOCK_S = 2.0


def digests(files: Sequence[Path], cache: Path) -> list[str]:
    """Return the SHA-256 of each file: from `cache` if the file is unchanged. Raises OSError for an unreadable file."""
    places = [str(file.absolute()) for file in files]
    store = cache / "digests" / f"{hashlib.sha256(json.dumps(places).encode()).hexdigest()[:32]}.json"
    now_ns = _now_ns(store.parent)  # read before the files' own times, so that the comparison below is safe
    stats = [file.stat() for file in files]
    states = [[stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino] for stat in stats]
    known = _known(store)
    digest_of = {
        place: known[place][1] for place, state in zip(places, states, strict=True) if [state] == known[place][:1]
    }
    changed = [(place, file) for place, file in zip(places, files, strict=True) if place not in digest_of]
    if changed:
        with ThreadPoolExecutor() as pool:  # hashing releases the GIL
            contents = pool.map(digest_of_file, [file for _, file in changed])
            digest_of.update(zip((place for place, _ in changed), contents, strict=True))
        stored = {
            place: (state, digest_of[place])
            for place, state, stat in zip(places, states, stats, strict=True)
            if stat.st_ctime_ns < now_ns.get(stat.st_dev, now_ns[None]) - _COARSEST_CLOCK_S * 1e9
        }
        with suppress(OSError):
            publish_text(store, json.dumps(stored))
    return [digest_of[place] for place in places]


def _now_ns(directory: Path) -> dict[int | None, int]:
    """Return the current time of the file system that holds `directory`, under its device number, in ns.

    The key None holds the time of this machine, which applies to files of other file systems.
    """
    now: dict[int | None, int] = {None: time.time_ns()}
    with suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            stat = os.fstat(file.fileno())
        now[stat.st_dev] = stat.st_ctime_ns
    return now


def _known(file: Path) -> defaultdict[str, list[Any]]:
    """Return the stored [state, digest] of each path; [] for a path without a stored digest."""
    known: defaultdict[str, list[Any]] = defaultdict(list)
    with suppress(OSError, ValueError, TypeError):
        known.update(json.loads(file.read_text(encoding="utf-8")))
    return known
