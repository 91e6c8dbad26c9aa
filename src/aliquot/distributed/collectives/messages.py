"""Messages between hosts: a pool of reusable buffers, and checksums.

The checksum of TCP lets one corrupted message of 65,536 pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that every bit of a message still counts after later messages


class BufferPool:
    """Buffers of one dtype for messages; at most `limit_bytes` of free buffers are kept."""

    def __init__(self, dtype: torch.dtype, limit_bytes: int) -> None:
        self._dtype = dtype
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Tensor]] = {}  # by elements
        self._free_bytes = 0

    def take(self, numel: int) -> Tensor:
        """Return a free buffer of `numel` elements, or a new one."""
        if not self._free.get(numel):
            self._drop(numel * self._dtype.itemsize)
            return torch.empty(numel, dtype=self._dtype)
        buffer = self._free[numel].pop()
        self._free_bytes -= buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool once its transfer is over."""
        if self._free_bytes + buffer.nbytes <= self._limit_bytes:
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._free_bytes += buffer.nbytes

    def _drop(self, size_bytes: int) -> None:
        """Free up to `size_bytes` of other sizes, so that a new buffer replaces them."""
        while size_bytes > 0 and self._free_bytes:
            dropped = next(buffers for buffers in self._free.values() if buffers).pop()
            self._free_bytes -= dropped.nbytes
            size_bytes -= dropped.nbytes


def checksum(values: npt.NDArray[Any]) -> int:
    """Return the sum of a contiguous array's bytes as 64-bit integers; a shorter rest counts as one integer."""
    data = values.view(np.uint8)
    words = len(data) // 8 * 8
    total = int(np.add.reduce(data[:words].view(np.uint64)))
    rest = int.from_bytes(data[words:].tobytes(), "little") if words < len(data) else 0
    return total + rest & _MASK


class Tally:
    """One checksum of many messages in their order."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, message: Tensor) -> None:
        """Include a flat message of any dtype."""
        self._total = self._total * _FACTOR + checksum(message.view(torch.uint8).numpy()) & _MASK

    def value(self) -> Tensor:
        """Return the checksum as int64 [1], to be sent."""
        return torch.from_numpy(np.array([self._total], np.uint64).view(np.int64))


def corruption_error(values: str) -> SelfTestError:
    """Return the error for `values` ("gradients of rank 3") that arrived changed."""
    return SelfTestError(f"{values} are not those that were sent: broken network, memory or torch?")
