"""Memory for messages, used again: what a transfer was given is free when it is over."""

from __future__ import annotations

import torch
from torch import Tensor


class Rooms:
    """Of one dtype; at most `most_bytes` are kept while nobody uses them."""

    def __init__(self, dtype: torch.dtype, most_bytes: int) -> None:
        self._dtype = dtype
        self._most_bytes = most_bytes
        self._free: dict[int, list[Tensor]] = {}  # by elements
        self._free_bytes = 0

    def take(self, numel: int) -> Tensor:
        if not self._free.get(numel):
            self._drop(numel * self._dtype.itemsize)
            return torch.empty(numel, dtype=self._dtype)
        room = self._free[numel].pop()
        self._free_bytes -= room.nbytes
        return room

    def _drop(self, size_bytes: int) -> None:
        """As much of what is free, where there is as much: rooms of other sizes are not kept beside new ones."""
        while size_bytes > 0 and self._free_bytes:
            dropped = next(rooms for rooms in self._free.values() if rooms).pop()
            self._free_bytes -= dropped.nbytes
            size_bytes -= dropped.nbytes

    def give(self, room: Tensor) -> None:
        if self._free_bytes + room.nbytes <= self._most_bytes:
            self._free.setdefault(room.numel(), []).append(room)
            self._free_bytes += room.nbytes
