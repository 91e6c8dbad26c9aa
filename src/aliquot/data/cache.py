"""The cache of everything that is derived from data: a directory a result, named by the hash of all that went into it,
written beside and published by one rename, so that a directory that exists is complete.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aliquot.core.errors import storage_error
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
