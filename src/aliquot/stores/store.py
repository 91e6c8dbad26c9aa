"""Files under a URL: an object store, or a mounted directory; and the store for a URL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote

from aliquot.core.errors import MissingToolError, UsageError, has_url_credentials


class Store(ABC):
    """Files with names such as `step-00000100/state.json`, under a URL. Every method may raise StorageError.

    Several processes write a file together: one process calls `begin`, each process sends parts, and one process, with
    the receipts of all parts, calls `complete`. Threads may share a store.
    """

    verifies_checksums: ClassVar[bool] = False  # of received parts; if not, the writer must read the parts back

    @abstractmethod
    def part_bytes(self, size_bytes: int) -> int:
        """Return the size of a part: a multiple of 16 MiB, or the whole file if only one process can write it."""

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Return the size of every file by name; unfinished files may be among them."""

    @abstractmethod
    def read(self, name: str, start: int, stop: int) -> bytes:
        """Return bytes [start, stop), fewer at the end of the file. Raises DamagedCheckpoint for a missing file."""

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


def is_url(text: str) -> bool:
    return "://" in text


def open_store(url: str) -> Store:
    """Return the store for `url`, without a request to it.

    Raises UserError for a missing package, and for a URL that is file:// with a host or has credentials in it.
    """
    if has_url_credentials(url):
        raise UsageError(f"{url} has a user name or password in it: give credentials by the environment instead")
    if url.startswith("file://"):
        from aliquot.stores.file_system_stores import LocalStore

        host, _, path = url.removeprefix("file://").partition("/")
        if host not in ("", "localhost"):
            example = "a directory of this machine has three slashes, file:///DIRECTORY"
            raise UsageError(f"{url}: {example}; {host!r} is a host")
        return LocalStore(Path("/" + unquote(path)))
    if url.startswith("s3://"):
        try:
            from aliquot.stores.s3_store import S3Store
        except ImportError:
            raise MissingToolError(f"{url} needs boto3: pip install 'aliquot[s3]'") from None
        return S3Store(url)
    from aliquot.stores.file_system_stores import FsspecStore

    return FsspecStore(url)
