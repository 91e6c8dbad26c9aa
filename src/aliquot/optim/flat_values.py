"""Values of a flat shard in fp32 or bf16: weights that have no separate master weights, and moments."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class ExactValues:
    """fp32 values. `start` is an index in the shard.

    `replicas` are copies on other NUMA nodes. `store` also writes the replicas; a direct write to `values` does not.
    """

    def __init__(self, values: Tensor, replicas: Sequence[Tensor] = ()) -> None:
        self.values = values
        self.is_alone = not replicas
        self.numel, self.size_bytes = values.numel(), values.nbytes
        self._replicas = replicas

    def load(self, start: int, out: Tensor) -> Tensor:
        """Return `out.numel()` elements from `start` on, in fp32 `out` or as a view of the stored fp32 memory."""
        return self.values[start : start + out.numel()]

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        """Set elements from `start` on, rounded to nearest if `noise` is None, which keeps loaded values."""
        for copy in (self.values, *self._replicas):
            target = copy[start : start + values.numel()]
            if target.data_ptr() != values.data_ptr():
                target.copy_(values)


class Bf16Values:
    """bf16 values, and replicas on other NUMA nodes. Without noise, ties round to even."""

    def __init__(self, values: Tensor, replicas: Sequence[Tensor] = ()) -> None:
        self.numel, self.size_bytes = values.numel(), values.nbytes
        self._copies = (values, *replicas)

    def load(self, start: int, out: Tensor) -> Tensor:
        return out.copy_(self._copies[0][start : start + out.numel()])

    def store(self, start: int, values: Tensor, noise: Tensor | None = None) -> None:
        if noise is not None:
            # Adding noise below the last stored bit, then dropping bits, rounds up with the right probability.
            bits = values.view(torch.int32).add((noise * 0x10000).to(torch.int32)).bitwise_and_(-0x10000)
            values = bits.view(torch.float32)
        for copy in self._copies:
            copy[start : start + values.numel()].copy_(values)
