"""Master weights on flat shards: fp32 values, kept whole or as the bf16 copy that is computed from plus what it lacks.

A split master costs 4 bytes a parameter in total, of which the 2 that every rank computes from are the same bytes:
master = high + low, where `high` is the master rounded to bf16 and `low` the int16 distance between their bit patterns.
Ties round away from zero: to even, a tie would leave a distance of +32768, which int16 has not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
    """fp32 memory that is master and compute copy in one; `others` are copies on other NUMA nodes."""

    def __init__(self, values: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.values = values
        self.numel = values.numel()
        self._others = others

    def load(self, start: int, out: Tensor) -> Tensor:
        return self.values[start : start + out.numel()]

    def store(self, start: int, values: Tensor) -> None:
        for copy in (self.values, *self._others):
            target = copy[start : start + values.numel()]
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)


class SplitWeights:
    """bf16 `high` and, private, int16 `low`; `others` are copies of `high` on other NUMA nodes."""

    def __init__(self, high: Tensor, others: Sequence[Tensor] = ()) -> None:
        self.numel = high.numel()
        self._high = high
        self._others = others
        self._low = torch.zeros(high.numel(), dtype=torch.int16)

    def load(self, start: int, out: Tensor) -> Tensor:
        stop = start + out.numel()
        out.copy_(self._high[start:stop])
        out.view(torch.int32).add_(self._low[start:stop])
        return out

    def store(self, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        bits = values.view(torch.int32)
        # Adding half of the last kept bit to the magnitude, then dropping the rest, rounds ties away from zero.
        rounded = bits.add(0x8000).bitwise_and_(-0x10000)
        for copy in (self._high, *self._others):
            copy[start:stop].copy_(rounded.view(torch.float32))
        self._low[start:stop].copy_(bits - rounded)
