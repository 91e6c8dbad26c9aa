"""Storage formats for the weights of a flat shard, which are loaded and stored as fp32.

fp32 weights are both the master weights and the weights of forward and backward passes. Frozen bf16 weights have no
master weights.

A split master weight takes 4 bytes: master = high + low. `high` is the master weight rounded to bf16. All ranks share
`high`, because forward and backward passes use it. `low` is the int16 distance between the two bit patterns. Ties round
away from zero, because rounding to even would leave a distance of +32768, which int16 cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.optim.moments import Bf16Values, ExactValues
from aliquot.optim.sizes import low_bytes


class SplitWeights:
    """Split master weights: shared bf16 `high`, its replicas on other NUMA nodes, and private int16 `low`."""

    def __init__(self, high: Tensor, replicas: Sequence[Tensor] = (), low: Tensor | None = None) -> None:
        """`low`: memory of low_bytes(numel) that holds the distances; None: new memory of zeros."""
        self.numel = high.numel()
        self.high = high
        self.replicas = replicas
        self.low = self._distances(torch.zeros(low_bytes(self.numel), dtype=torch.uint8) if low is None else low)

    def _distances(self, memory: Tensor) -> Tensor:
        return memory.view(torch.int16)[: self.numel]

    def load(self, start: int, out: Tensor) -> Tensor:
        out.copy_(self.high[start : start + out.numel()])
        out.view(torch.int32).add_(self.low[start : start + out.numel()].int())
        return out

    def store(self, start: int, values: Tensor) -> None:
        self._publish(start, values)
        # The distance fits into int16, so it equals the low 16 bits of the master weight, which the cast keeps.
        self.low[start : start + values.numel()].copy_(values.view(torch.int32))

    def _publish(self, start: int, values: Tensor) -> None:
        # Adding half a unit in bf16's last place to the magnitude, then dropping bits, rounds ties away from zero.
        rounded = values.view(torch.int32).add(0x8000).bitwise_and_(-0x10000).view(torch.float32)
        for copy in (self.high, *self.replicas):
            copy[start : start + values.numel()].copy_(rounded)


class PairedWeights(SplitWeights):
    """Split master weights for a compiled update: two distances share an int32.

    Element i of the first half uses the low 16 bits, element i of the second half the high 16 bits. One vector of int32
    belongs to two vectors of weights, and the compiler keeps all three in registers. With int16, the compiler cannot
    do so. Loading and storing in blocks takes 1.5 times as long as with `SplitWeights`.
    """

    @property
    def half(self) -> int:
        return -(-self.numel // 2)

    def _distances(self, memory: Tensor) -> Tensor:
        return memory.view(torch.int32)

    def load(self, start: int, out: Tensor) -> Tensor:
        out.copy_(self.high[start : start + out.numel()])
        bits = out.view(torch.int32)
        first, second = self._by_half(start, out.numel())
        bits[: first.numel()] += (first << 16) >> 16
        bits[first.numel() :] += second >> 16
        return out

    def store(self, start: int, values: Tensor) -> None:
        self._publish(start, values)
        bits = values.view(torch.int32)
        first, second = self._by_half(start, values.numel())
        first.bitwise_and_(-0x10000).bitwise_or_(bits[: first.numel()] & 0xFFFF)
        second.bitwise_and_(0xFFFF).bitwise_or_(bits[first.numel() :] << 16)

    def _by_half(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Return the int32 values of elements [start, start + count) in the first half, and in the second half."""
        stop = start + count
        middle = min(max(start, self.half), stop)
        empty = self.low[:0]
        first = self.low[start:middle] if start < middle else empty
        return first, self.low[middle - self.half : stop - self.half] if middle < stop else empty


Weights = ExactValues | Bf16Values | SplitWeights
