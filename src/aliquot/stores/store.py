"""Read and write files under a URL: a mounted directory (file://), S3 (s3_store.py) or fsspec stores (gs://, ...)."""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import unquote

from aliquot.core.errors import (
    MissingToolError,
    StorageError,
    StorageFailureError,
    UsageError,
    UserError,
    has_url_credentials,
    reading,
    writing,
)
from aliquot.core.small_files import flush_to_disk, publish_bytes

_PART_BYTES = 64 << 20
_READ_LIMIT_S = 600.0  # for a listing, or one read of at most a part
# Errors of fsspec's file systems that would recur if the request were repeated.
_PERMANENT = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)
# Details of fsspec's file systems that tell one version of a file from another. Others are no sign of a change, such as
# times of access, or are in a listing but not in the details of one file.
_IDENTITY = {
    "size", "ETag", "etag", "generation", "blob_id", "md5Hash", "mtime", "updated", "last_modified", "LastModified",
    "modified", "created",
}  # fmt: skip


class FileVersion(NamedTuple):
    """The size of a file, and a text that changes whenever the content of the file changes."""

    size_bytes: int
    version: str


class FileChangedError(Exception):
    """A file is no longer the version that the reader asked for."""


class Store(ABC):
    """Files with names such as `step-00000100/state.json`, under a URL. Every method may raise StorageError.

    Several processes write a file together: one process calls `begin`, each process sends parts, and one process, with
    the receipts of all parts, calls `complete`. Threads may share a store.
    """

    verifies_checksums: ClassVar[bool] = False  # of received parts; otherwise writers must read parts back

    @abstractmethod
    def part_bytes(self, size_bytes: int) -> int:
        """Return the size of a part: a multiple of 16 MiB, or the whole file if only one process can write it."""

    @abstractmethod
    def find(self, name: str = "") -> dict[str, FileVersion]:
        """Return every file with this name or below this directory, by name; unfinished files may be among them."""

    def list(self) -> dict[str, int]:
        """Return the size of every file by name."""
        return {name: file.size_bytes for name, file in self.find().items()}

    @abstractmethod
    def read(self, name: str, start: int, stop: int, version: FileVersion | None = None) -> bytes:
        """Return bytes [start, stop), fewer at the end of the file; with `version`, only of this version from `find`.

        Raises FileNotFoundError for a missing file, and FileChangedError if the file has another version.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically."""

    def begin(self, name: str, size_bytes: int) -> str:
        """Begin a file of `size_bytes` and return the token for `put_part` and `complete`."""
        return ""

    @abstractmethod
    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        """Write part `index`, which begins at byte `start`, and return its receipt."""

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:  # noqa: B027
        """Complete a file from all its parts, whose receipts are in order."""

    @abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Remove files in this order; missing files are no error."""

    def abort(self) -> None:  # noqa: B027
        """Discard all files under the URL that any process has begun and not completed."""


class LocalStore(Store):
    """A directory of a mounted file system, which may be a network file system."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def part_bytes(self, size_bytes: int) -> int:
        return _PART_BYTES

    def find(self, name: str = "") -> dict[str, FileVersion]:
        with reading(self._root):
            place = self._root / name
            files = [path for path in (place, *place.rglob("*")) if path.is_file()]
            return {path.relative_to(self._root).as_posix(): _version_of(path.stat()) for path in files}

    def read(self, name: str, start: int, stop: int, version: FileVersion | None = None) -> bytes:
        path = self._root / name
        if not path.exists():
            raise FileNotFoundError(path)
        with reading(path), path.open("rb") as file:
            data = os.pread(file.fileno(), stop - start, start)
            if version not in (None, _version_of(os.fstat(file.fileno()))):  # checked after reading
                raise FileChangedError
        return data

    def put(self, name: str, data: bytes) -> None:
        path = self._root / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            publish_bytes(path, data)

    def begin(self, name: str, size_bytes: int) -> str:
        path = self._root / name
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.truncate(size_bytes)
        return ""

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        path = self._root / name
        with writing(path), path.open("r+b") as file:  # an unbuffered write may write only part of a block
            file.seek(start)
            for block in data:
                file.write(block)
            flush_to_disk(file)
        return ""

    def remove(self, names: Sequence[str]) -> None:
        paths = [self._root / name for name in names]
        for path in paths:
            with writing(path):
                path.unlink(missing_ok=True)
        for folder in {path.parent for path in paths} - {self._root}:
            with suppress(OSError):  # the folder holds other files, or no longer exists
                folder.rmdir()


class FsspecStore(Store):
    """A file system of fsspec. One process writes a whole file, because fsspec has no multipart uploads."""

    def __init__(self, url: str) -> None:
        """Raises UserError if the package for `url` is missing."""
        from fsspec.core import url_to_fs

        self._url = url
        self._details: dict[str, Mapping[str, object]] = {}  # of each path that `find` has listed
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise MissingToolError(f"{url}: {' '.join(str(error).split())}") from None
        except Exception as error:  # each file system raises different errors, also for an incomplete URL
            raise StorageError(f"{type(error).__name__}: {' '.join(str(error).split())}", url) from error

    def part_bytes(self, size_bytes: int) -> int:
        return max(1, size_bytes)

    def find(self, name: str = "") -> dict[str, FileVersion]:
        with self._request():
            self._fs.invalidate_cache()
            paths = _within_limit(self._fs.find, self._path(name) if name else self._root, detail=True)
            # fsspec finds a path that is a file, but without details.
            facts = {path: details or _within_limit(self._fs.info, path) for path, details in paths.items()}
        self._details |= facts
        return {
            path.removeprefix(f"{self._root}/"): FileVersion(
                # The hash covers for example the ETag, the generation or the time of change.
                int(details["size"]),
                hashlib.sha256(repr(sorted(details.items())).encode()).hexdigest(),
            )
            for path, details in facts.items()
        }

    def read(self, name: str, start: int, stop: int, version: FileVersion | None = None) -> bytes:
        path = self._path(name)
        with self._request(name, FileNotFoundError, FileChangedError):
            data = bytes(_within_limit(self._fs.cat_file, path, start=start, end=stop)) if start < stop else b""
            if version is not None:  # checked after reading: the file had this version before, in `find`
                self._fs.invalidate_cache()
                _refuse_change(self._details[path], _within_limit(self._fs.info, path))
        return data

    def put(self, name: str, data: bytes) -> None:
        self.put_part(name, "", 0, 0, [data])

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        with self._request(name):
            self._fs.makedirs(self._fs._parent(self._path(name)), exist_ok=True)
            with self._fs.open(self._path(name), "wb") as file:
                for block in data:
                    file.write(block)
        return ""

    def remove(self, names: Sequence[str]) -> None:
        with self._request():
            for name in names:
                if self._fs.exists(self._path(name)):
                    self._fs.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _request(self, name: str = "", *passed: type[Exception]) -> Iterator[None]:
        """Turn errors of the file system in the block, except those `passed`, into a StorageError of file `name`."""
        try:
            yield
        except Exception as error:  # each file system raises different errors
            if isinstance(error, (UserError, *passed)):  # the iterator `data` raises UserError
                raise
            error_type = StorageError if isinstance(error, _PERMANENT) else StorageFailureError
            url = f"{self._url}/{name}" if name else self._url
            raise error_type(f"{type(error).__name__}: {' '.join(str(error).split())}", url) from error


def _within_limit(work: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return `work(*arguments, **options)`, called in a thread, because a server may be silent or send very little.

    Raises the exception of `work`, and TimeoutError after _READ_LIMIT_S.
    """
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(work(*arguments, **options))
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return result.result(_READ_LIMIT_S)
    except TimeoutError as error:
        raise error if result.done() else TimeoutError(f"no answer within {_READ_LIMIT_S:g} s") from None


def _version_of(stat: os.stat_result) -> FileVersion:
    return FileVersion(stat.st_size, str(stat.st_mtime_ns))


def _refuse_change(listed: Mapping[str, object], details: Mapping[str, object]) -> None:
    """Raise FileChangedError if the details of a file differ from those in a listing, as far as both have them."""
    for key in _IDENTITY & listed.keys() & details.keys():
        # A file system may list a time as a number, and give it as a datetime for one file.
        before, now = (
            value.timestamp() if isinstance(value, datetime) else value for value in (listed[key], details[key])
        )
        if before != now and type(before) is type(now):
            raise FileChangedError


def is_url(text: str) -> bool:
    return "://" in text


def open_store(url: str) -> Store:
    """Return the store for `url`, without sending a request.

    Raises UserError if a package is missing, if a file:// URL has a host, or if the URL contains credentials.
    """
    if has_url_credentials(url):
        raise UsageError(f"{url} has a user name or password in it: give credentials by the environment instead")
    if url.startswith("file://"):
        host, _, path = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            raise UsageError(
                f"{url}: a directory of this machine has three slashes, file:///DIRECTORY; {host!r} is a host"
            )
        return LocalStore(Path("/" + unquote(path)))
    if url.startswith("s3://"):
        try:
            from aliquot.stores.s3_store import S3Store
        except ImportError:
            raise MissingToolError(f"{url} needs boto3: pip install 'aliquot[s3]'") from None
        return S3Store(url)
    return FsspecStore(url)
