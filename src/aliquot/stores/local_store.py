"""file://: a directory of a file system that is mounted, perhaps over the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from aliquot.core.errors import DamagedCheckpoint, reading, writing
from aliquot.core.small_files import publish_bytes

_PART_BYTES = 64 << 20


class LocalStore:
    compares: ClassVar[bool] = False

    def __init__(self, root: Path) -> None:
        self._root = root

    def part_bytes(self, size_bytes: int) -> int:
        return _PART_BYTES

    def list(self) -> dict[str, int]:
        with reading(self._root):
            files = [path for path in self._root.rglob("*") if path.is_file()]
            return {path.relative_to(self._root).as_posix(): path.stat().st_size for path in files}

    def read(self, name: str, start: int, stop: int) -> bytes:
        path = self._root / name
        with reading(path):
            if not path.exists():
                raise DamagedCheckpoint("is not there", path)
            with path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)

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
        with writing(path), path.open("r+b") as file:  # buffered: a write of its own may take a part alone
            file.seek(start)
            for block in data:
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return ""

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:
        pass

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._root / name
            with writing(path):
                path.unlink(missing_ok=True)
        for folder in {(self._root / name).parent for name in names} - {self._root}:
            with suppress(OSError):  # it holds other files, or is gone
                folder.rmdir()

    def abort(self) -> None:
        pass
