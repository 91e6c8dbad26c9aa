"""Sums over ranks in fp32, in the order of the ranks, in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 1 << 16  # elements: 256 KiB of fp32


def add_sum(out: Tensor, sources: Sequence[Tensor], first: bool) -> None:
    """out += sources[0] + sources[1] + ..., or out = that sum if `first`. All flat; `out` fp32 (or fp64)."""
    scratch = out.new_empty(min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        own = out[start:stop]
        total = own if first else scratch[: stop - start]
        total.copy_(sources[0][start:stop])
        for source in sources[1:]:
            total.add_(source[start:stop])
        if not first:
            own.add_(total)
