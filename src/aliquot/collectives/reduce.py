"""Sums over ranks in fp32, in the order of the ranks, in blocks that stay in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements: 256 KiB of fp32


NEAREST = 0x8000  # instead of noise: half of the last bit that stays


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


def rounding_noise(step: int, micro_batch: int, host: int) -> Tensor:
    """int32, for `add_sum_rounded`: a draw of its own for each host, or their roundings would add up in the sum."""
    digest = hashlib.sha256(f"{step}:{micro_batch}:{host}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    return torch.randint(0, 1 << 16, (_BLOCK,), dtype=torch.int32, generator=generator)


def add_sum_rounded(out: Tensor, sources: Sequence[Tensor], first: bool, noise: Tensor | None) -> None:
    """As `add_sum`, summed in fp32 and rounded once to `out`, bf16.

    What has been summed before is rounded again: with `noise` up as often as the distance asks for, so that small
    contributions to a large sum are not lost. The first is rounded to nearest, ties away from zero.
    """
    scratch = torch.empty(2, min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        own, total, before = out[start:stop], scratch[0, : stop - start], scratch[1, : stop - start]
        total.copy_(sources[0][start:stop])
        for source in sources[1:]:
            total.add_(source[start:stop])
        if not first:
            total.add_(before.copy_(own))
        bits = total.view(torch.int32)
        bits.add_(NEAREST if first or noise is None else noise[: stop - start]).bitwise_and_(-0x10000)
        own.copy_(total)
