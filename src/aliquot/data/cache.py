"""The cache of everything that is derived from data: a directory a result, named by the hash of all that went into it,
written beside and published by one rename, so that a directory that exists is complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aliquot.errors import StorageError


def cache_root(configured: Path | None) -> Path:
    """`data.cache_directory`, else $ALIQUOT_CACHE, else ~/.cache/aliquot."""
    if configured is not None:
        return configured.expanduser().absolute()
    return Path(os.environ.get("ALIQUOT_CACHE") or "~/.cache/aliquot").expanduser().absolute()


@contextmanager
def publishing(directory: Path) -> Iterator[Path]:
    """Yield an empty directory beside `directory`; when the block ends well, it is fsynced and gets the name.

    If another process published the same result first, theirs stays: the content is the same by construction.
    Raises UserError where the cache cannot be written; the block may raise its own.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory.parent)
        beside = Path(tempfile.mkdtemp(prefix=f".{directory.name[:16]}-", dir=directory.parent))
    except OSError as error:
        raise StorageError(
            f"cannot write the data cache: {error.strerror}; set data.cache_directory", directory.parent
        ) from (error)
    try:
        yield beside
        for path in beside.iterdir():
            _fsync(path)
        _fsync(beside)
        try:
            beside.rename(directory)
        except OSError:
            if not directory.is_dir():
                raise
        _fsync(directory.parent)
    except OSError as error:
        raise StorageError(f"cannot write the data cache: {error}; set data.cache_directory", directory) from error
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


def _sweep(parent: Path) -> None:
    """Remove what killed processes left here more than a day ago."""
    for path in parent.glob(".*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > 86400:
                shutil.rmtree(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
