"""Messages between hosts: their buffers, which are used again, and their checksums.

TCP's own checksum lets one broken message of 65,536 through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15  # odd: every bit of an earlier message still counts after a later one


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


def checksum(values: npt.NDArray[Any]) -> int:
    """Of a contiguous array: the sum of its bytes as integers of eight, and of what is left as one."""
    data = values.view(np.uint8)
    words = len(data) // 8 * 8
    total = int(np.add.reduce(data[:words].view(np.uint64)))
    rest = int.from_bytes(data[words:].tobytes(), "little") if words < len(data) else 0
    return total + rest & _WORD


class Tally:
    """One checksum of many messages in their order."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, message: Tensor) -> None:
        """`message` is flat, of any dtype."""
        self._total = self._total * _STEP + checksum(message.view(torch.uint8).numpy()) & _WORD

    def told(self) -> Tensor:
        """int64 [1], to be sent."""
        return torch.from_numpy(np.array([self._total], np.uint64).view(np.int64))


def not_as_sent(who: str) -> SelfTestError:
    """Of values that begin the message."""
    return SelfTestError(f"{who} are not those that were sent: broken network, memory or torch?")
