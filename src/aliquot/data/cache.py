"""The data cache: directories named by the hash of their inputs, and stored hashes of source files.

A cached directory is written under a temporary name and published by one rename, so that every published directory is
complete. It holds checksums of its files, as a checkpoint does: before a directory is used, all its bytes are verified,
and a damaged directory is made again. The cache also stores hashes of file contents, so that a later run need not read
terabytes to find that the files are unchanged. A file counts as unchanged while its size, times and inode are the same.

The hash of a file that was written just before hashing is not stored. The clock of the file system may be too coarse
to show that the file has changed again. The ctime tells when a file was written, even if a program copied the mtime.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from aliquot.core.decode import publish_checked_json, read_checked_json
from aliquot.core.errors import DamagedCheckpoint, UnfitFileError, storage_error
from aliquot.core.small_files import read_small_file
from aliquot.tensor_io.manifest import file_record, manifest_bytes, parse_manifest
from aliquot.tensor_io.publish import begin_alone, commit, sync, write_file

_log = logging.getLogger(__name__)
_SAMPLE_BYTES = 1 << 16
_CHECKSUMS = ".checksums"  # the manifest of a cached directory; hidden, because a copy has the name of its file


def cached(directory: Path, make: Callable[[Path], object]) -> Path:
    """Return `directory` of the cache. If it is missing or damaged, `make` writes its files into an empty directory.

    Raises StorageError if the cache cannot be read or written.
    """
    if (reason := damage(directory)) is not None:
        if directory.exists():
            _log.warning("data cache: %s: %s; it is made again", directory, reason)
        with publishing(directory) as partial:
            make(partial)
    return directory


def damage(directory: Path) -> str | None:
    """Return why the files of a cached directory cannot be trusted; None if all bytes are as they were published.

    Raises StorageError if the files cannot be read for a reason that is no damage, such as another user's permissions.
    """
    path = directory / _CHECKSUMS
    try:
        records = parse_manifest(read_small_file(path), path).files
        for path in (directory / name for name in records):
            if not path.is_file() or file_record(path) != records[path.name]:
                return f"{path.name} is damaged"
    except (FileNotFoundError, NotADirectoryError):
        return "the checksums of its files are missing"
    except (ValueError, DamagedCheckpoint, UnfitFileError):
        return "the checksums of its files are damaged"
    except OSError as error:
        is_refused = error.errno in (errno.EACCES, errno.EPERM)
        advice = "; set data.cache_directory to a directory of this user" if is_refused else ""
        raise storage_error(f"cannot read the data cache: {error.strerror}{advice}", error, path) from error
    return None


@contextmanager
def publishing(directory: Path) -> Iterator[Path]:
    """Yield an empty directory next to `directory`; if the block succeeds, add checksums, sync the files and rename it.

    If another process publishes `directory` first, the published one stays, because both have the same content. A
    damaged one is replaced.
    """
    partial = None
    try:
        partial = begin_alone(directory)
        partial.chmod(0o700)  # training data may be confidential
        _sweep(directory.parent, partial.stat().st_mtime)
        yield partial
        files = sorted(partial.iterdir())  # directories among them have checksums of their own
        records = {path.name: file_record(path) for path in files if path.is_file()}
        write_file(partial / _CHECKSUMS, manifest_bytes(records, ()))
        for path in files:
            sync(path)
        try:
            if damage(directory) is not None:
                commit(partial, directory, replace=True)
        except OSError:
            if damage(directory) is not None:
                raise
    except OSError as error:
        raise storage_error(
            f"cannot write the data cache: {error.strerror or error}; set data.cache_directory",
            error,
            directory.parent if partial is None else directory,
        ) from error
    finally:
        if partial is not None:
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
    known = read_checked_json(store) or {}
    digest_of = {
        place: known[place][1]
        for place, state in zip(places, states, strict=True)
        if [state] == known.get(place, [])[:1]
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
            publish_checked_json(store, stored)
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
