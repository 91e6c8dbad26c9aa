"""gs://, az:// and whatever else fsspec has a file system for. One process writes a file: fsspec knows no parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from fsspec.core import url_to_fs

from aliquot.core.errors import DamagedCheckpoint, MissingToolError, StorageError, StorageFailureError

_REFUSED = (FileNotFoundError, PermissionError, NotImplementedError, TypeError, ValueError)  # and would be again


class FsspecStore:
    compares: ClassVar[bool] = False

    def __init__(self, url: str) -> None:
        """Raises UserError where the package for such URLs is missing."""
        self._url = url
        self._fs: Any
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise MissingToolError(f"{url}: {' '.join(str(error).split())}") from None
        # Each file system has errors of its own, of what an address lacks too.
        except Exception as error:
            raise StorageError(f"{type(error).__name__}: {' '.join(str(error).split())}", url) from error

    def part_bytes(self, size_bytes: int) -> int:
        return max(1, size_bytes)

    def list(self) -> dict[str, int]:
        with self._asking():
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        return {path.removeprefix(f"{self._root}/"): int(about["size"]) for path, about in found.items()}

    def read(self, name: str, start: int, stop: int) -> bytes:
        with self._asking():
            try:
                return bytes(self._fs.cat_file(self._at(name), start=start, end=stop)) if start < stop else b""
            except FileNotFoundError:
                raise DamagedCheckpoint(f"{name} is not there", self._url) from None

    def put(self, name: str, data: bytes) -> None:
        self.put_part(name, "", 0, 0, [data])

    def begin(self, name: str, size_bytes: int) -> str:
        return ""

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        with self._asking():
            self._fs.makedirs(self._fs._parent(self._at(name)), exist_ok=True)
            with self._fs.open(self._at(name), "wb") as file:
                for block in data:
                    file.write(block)
        return ""

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        with self._asking():
            for name in names:
                if self._fs.exists(self._at(name)):
                    self._fs.rm_file(self._at(name))

    def abort(self) -> None:
        pass

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except (DamagedCheckpoint, StorageError):  # of the data that are to be written, or of a file that is not there
            raise
        # Each file system has errors of its own.
        except Exception as error:
            kind = StorageError if isinstance(error, _REFUSED) else StorageFailureError
            raise kind(f"{type(error).__name__}: {' '.join(str(error).split())}", self._url) from error
