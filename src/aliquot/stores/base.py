"""Files that lie elsewhere, under a URL: an object store, or a directory that is mounted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, Protocol


class Store(Protocol):
    """Files by names such as `step-00000100/state.json`, under a URL. Every method may raise StorageError.

    Several processes write a file: one calls `begin`, each sends parts, and one, with all their receipts, calls
    `complete`. Threads may share a store.
    """

    compares: ClassVar[bool]  # whether it compares a checksum of what it has received: else it must be read back

    def part_bytes(self, size_bytes: int) -> int:
        """Of a file that large; a multiple of 16 MiB, or all of it where only one process can write it."""
        ...

    def list(self) -> dict[str, int]:
        """The size of every file; unfinished ones may be among them."""
        ...

    def read(self, name: str, start: int, stop: int) -> bytes:
        """Bytes [start, stop), fewer where the file ends before. Raises DamagedCheckpoint where there is no file."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """A small file that appears whole or not at all."""
        ...

    def begin(self, name: str, size_bytes: int) -> str:
        """A token that whoever sends parts needs."""
        ...

    def put_part(self, name: str, token: str, index: int, start: int, data: Iterable[bytes]) -> str:
        """Part `index`, which begins at byte `start`; its receipt."""
        ...

    def complete(self, name: str, token: str, receipts: Sequence[str]) -> None:
        """All parts are there; their receipts in order."""
        ...

    def remove(self, names: Sequence[str]) -> None:
        """In order; what is not there is left alone."""
        ...

    def abort(self) -> None:
        """Forget what has been begun here and not completed, whoever began it."""
        ...
