"""Sums over ranks in fp32, in the order of the ranks, in blocks that stay in the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements: 256 KiB of fp32


def add_sum(out: Tensor, sources: Sequence[Tensor], first: bool) -> None:
    """out += sources[0] + sources[1] + ..., or out = that sum if `first`. All flat; `out` fp32 (or fp64)."""
    scratch = out.new_empty(min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        own = out[start:stop]
        total = own if first else scratch[: stop - start]
        pieces = [source[start:stop] for source in sources]
        if len(pieces) > 1 and pieces[0].dtype == out.dtype:
            torch.add(pieces[0], pieces[1], out=total)  # in another dtype it would round the sum to that
            rest = pieces[2:]
        else:
            total.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            total.add_(piece)
        if not first:
            own.add_(total)
