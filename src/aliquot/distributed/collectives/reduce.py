"""Sums over ranks in fp32, in the order of the ranks, in blocks that stay in the cache."""

from __future__ import annotations

import hashlib
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


class RoundingNoise:
    """By an element's place in its weight: what is summed by others, or elsewhere, is rounded alike. Each host has a
    draw of its own, or their roundings would add up in the sum over them."""

    def __init__(self, step: int, micro_batch: int, host: int) -> None:
        digest = hashlib.sha256(f"{step}:{micro_batch}:{host}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        draw = torch.randint(0, 1 << 16, (_BLOCK,), dtype=torch.int32, generator=generator)
        self._values = draw.repeat(2)

    def at(self, place: int, count: int) -> Tensor:
        """int32 [count], of no more than a block."""
        return self._values[place % _BLOCK :][:count]

    def of_rows(self, rows: Tensor, width: int) -> Tensor:
        """int32 [rows, width]; not what `at` gives for the same places: of a tied embedding the head's sum and the
        rows looked up are added one after the other, and their roundings would be wrong together."""
        return self._values[((rows * width)[:, None] + torch.arange(width) + _BLOCK // 2) % _BLOCK]


def add_sum_rounded(
    out: Tensor, sources: Sequence[Tensor], first: bool, noise: RoundingNoise | None, place: int = 0
) -> None:
    """As `add_sum`, summed in fp32 and rounded once to `out`, bf16, whose first element is at `place` of its weight.

    What has been summed before is rounded again: with `noise` up as often as the distance asks for, so that small
    contributions to a large sum are not lost. The first is rounded to nearest, ties to even: sums of a few bf16 numbers
    often are ties, which would all become larger if they went away from zero.
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
        if not first and noise is not None:
            _round(total, noise.at(place + start, stop - start))
        own.copy_(total)


def add_rows_rounded(
    out: Tensor, numbers: Tensor, values: Tensor, first: bool, noise: RoundingNoise | None, first_row: int
) -> None:
    """As `add_sum_rounded`: `values`, fp32 [rows, width], are added to rows `numbers` of `out`, of which each comes
    once; row 0 of `out` is `first_row` of its weight."""
    width = out.shape[1]
    at_once = max(1, _BLOCK // width)
    chunks = zip(torch.split(numbers, at_once), torch.split(values.float(), at_once), strict=True)
    for rows, total in chunks:
        if not first:
            total = total + out[rows]
            if noise is not None:
                _round(total, noise.of_rows(first_row + rows, width))
        out[rows] = total.to(out.dtype)


def _round(values: Tensor, noise: Tensor) -> None:
    """fp32 becomes what bf16 holds: noise below the last bit that stays, then the rest dropped."""
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)
