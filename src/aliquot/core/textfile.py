"""Small files: read those that strangers may have put there, and publish those of ours in one piece.

Whoever reads a published file sees the old content or the new one, never a half. Files open without following a link.
A clone without git-lfs has a pointer in the place of a file.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Literal

LIMIT_BYTES = 100_000_000  # tokenizers have 35 MB; safetensors' own limit for a header
_SNAPSHOTS, _BLOBS = "snapshots", "blobs"  # of the hub's cache, where snapshots/REVISION/FILE is a link into blobs


def read_small_file(path: Path, limit: int = LIMIT_BYTES, anywhere: bool = False) -> bytes:
    """Return the content of a regular file of at most `limit` bytes.

    Raises ValueError for any other file, and for a link that leads out of the file's directory, unless it may lead
    `anywhere`, because a person has named the file. Raises OSError as open() does.
    """
    if not anywhere:
        refuse_link(path, path.parent)
    # O_NONBLOCK: opening a fifo would wait for ever. It has no effect on a regular file.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        _refuse_unfit(os.fstat(file.fileno()), limit)
        data = file.read(limit + 1)
    if len(data) > limit:  # those of /proc have no size
        raise ValueError(f"larger than {limit} bytes")
    return data


def check_small(path: Path, limit: int = LIMIT_BYTES) -> None:
    """Raise ValueError unless `path`, which a library will read, is a regular file of at most `limit` bytes."""
    _refuse_unfit(path.stat(), limit)


def refuse_link(path: Path, directory: Path) -> None:
    """Raise ValueError where `path` leads out of `directory`, or of the hub's cache if `directory` is a snapshot."""
    target, home = path.resolve(), directory.resolve()
    blobs = home.parents[1] / _BLOBS if home.parent.name == _SNAPSHOTS else home
    if not target.is_relative_to(home) and not target.is_relative_to(blobs):
        raise ValueError(f"a link to {target}, which is outside of its directory: put a copy in the place of the link")


def _refuse_unfit(found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("not a regular file")
    if found.st_size > limit:
        raise ValueError(f"{found.st_size} bytes, which is more than {limit}")


def open_unlinked(path: Path, mode: Literal["w", "a", "wb", "ab", "ab+"], **options: Any) -> IO[Any]:
    """open() to write in a directory of a run. Raises OSError where `path` is a link, which a stranger may have put
    there; a file to overwrite is replaced by a new one, whoever else has a name for it."""
    flags = (os.O_RDWR if "+" in mode else os.O_WRONLY) | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    if "a" in mode:
        flags |= os.O_APPEND
    else:
        flags |= os.O_EXCL
        with suppress(FileNotFoundError):
            path.unlink()
    return os.fdopen(os.open(path, flags, 0o666), mode, **options)


LFS_POINTER = "a git-lfs pointer, not the file itself: fetch it first (git lfs pull)"


def is_lfs_pointer(start: bytes) -> bool:
    """Whether a file that begins so is the three lines that git-lfs leaves of a file that it has not fetched."""
    return start.startswith(b"version https://git-lfs.github.com/spec/")


def publish_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, force it to the disk, rename it into place."""
    publish_bytes(path, text.encode())


def publish_bytes(path: Path, data: bytes) -> None:
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open_unlinked(beside, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError:  # a full disk is not made fuller
        with suppress(OSError):
            beside.unlink()
        raise
