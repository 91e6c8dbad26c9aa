"""Weights on flat shards, in and out as fp32: masters, kept whole or as the bf16 copy that is computed from plus what
it lacks; and, of what learns nothing, that copy alone.

A split master costs 4 bytes a parameter in total, of which the 2 that every rank computes from are the same bytes:
master = high + low, where `high` is the master rounded to bf16 and `low` the int16 distance between their bit patterns.
Ties round away from zero: to even, a tie would leave a distance of +32768, which int16 has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from aliquot.optim.sizes import low_bytes


class Weights(Protocol):
    """Flat fp32 values."""

    numel: int

    def load(self, start: int, out: Tensor) -> Tensor:
        """Elements from `start` on, as many as fp32 `out` has room for: in `out`, or where they lie."""
        ...

    def store(self, start: int, values: Tensor) -> None:
        """Set them; every copy shows it."""
        ...


class WholeWeights:
    """fp32 memory that is master and compute copy in one; `others` are copies on other NUMA nodes, which whoever writes
    into `values` leaves as they are."""

    def __init__(self, values: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.values = values
        self.is_alone = not others
        self.numel = values.numel()
        self._others = others

    def load(self, start: int, out: Tensor) -> Tensor:
        return self.values[start : start + out.numel()]

    def store(self, start: int, values: Tensor) -> None:
        for copy in (self.values, *self._others):
            target = copy[start : start + values.numel()]
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)


class RoundedWeights:
    """bf16 values that learn nothing; `others` are copies on other NUMA nodes. Ties round to even."""

    def __init__(self, values: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.numel = values.numel()
        self._copies = (values, *others)

    def load(self, start: int, out: Tensor) -> Tensor:
        return out.copy_(self._copies[0][start : start + out.numel()])

    def store(self, start: int, values: Tensor) -> None:
        for copy in self._copies:
            copy[start : start + values.numel()].copy_(values)


class SplitWeights:
    """bf16 `high` and, private, the int16 distances, in `low` or else 0; `others` are copies of `high` on other NUMA
    nodes."""

    def __init__(self, high: Tensor, others: Sequence[Tensor] = (), low: Tensor | None = None) -> None:
        """`low`: memory of low_bytes(numel)."""
        self.numel = high.numel()
        self.high = high
        self.others = others
        self.low = self._distances(torch.zeros(low_bytes(self.numel), dtype=torch.uint8) if low is None else low)

    def _distances(self, memory: Tensor) -> Tensor:
        return memory.view(torch.int16)[: self.numel]

    def load(self, start: int, out: Tensor) -> Tensor:
        out.copy_(self.high[start : start + out.numel()])
        out.view(torch.int32).add_(self.low[start : start + out.numel()].int())
        return out

    def store(self, start: int, values: Tensor) -> None:
        self._publish(start, values)
        # The distance is less than 2^15 either way: the low 16 bits of the master, which a cast keeps, tell it.
        self.low[start : start + values.numel()].copy_(values.view(torch.int32))

    def _publish(self, start: int, values: Tensor) -> None:
        # Adding half of the last kept bit to the magnitude, then dropping the rest, rounds ties away from zero.
        rounded = values.view(torch.int32).add(0x8000).bitwise_and_(-0x10000).view(torch.float32)
        for copy in (self.high, *self.others):
            copy[start : start + values.numel()].copy_(rounded)


class PairedWeights(SplitWeights):
    """For an update that is compiled: two distances share an int32, element i of the first half has the low 16 bits,
    element i of the second half the high ones. So one vector of them belongs to two vectors of weights, and a compiler
    can keep all in registers, which it cannot with int16. Block by block it takes half as long again."""

    @property
    def half(self) -> int:
        return -(-self.numel // 2)

    def _distances(self, memory: Tensor) -> Tensor:
        return memory.view(torch.int32)

    def load(self, start: int, out: Tensor) -> Tensor:
        out.copy_(self.high[start : start + out.numel()])
        bits = out.view(torch.int32)
        first, second = self._in_halves(start, out.numel())
        bits[: first.numel()] += (first << 16) >> 16
        bits[first.numel() :] += second >> 16
        return out

    def store(self, start: int, values: Tensor) -> None:
        self._publish(start, values)
        bits = values.view(torch.int32)
        first, second = self._in_halves(start, values.numel())
        first.bitwise_and_(-0x10000).bitwise_or_(bits[: first.numel()] & 0xFFFF)
        second.bitwise_and_(0xFFFF).bitwise_or_(bits[first.numel() :] << 16)

    def _in_halves(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """Where the distances of elements [start, start + count) are: of those in the first half, in the second."""
        stop = start + count
        middle = min(max(start, self.half), stop)
        empty = self.low[:0]
        first = self.low[start:middle] if start < middle else empty
        return first, self.low[middle - self.half : stop - self.half] if middle < stop else empty
