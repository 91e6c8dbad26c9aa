"""Sums over ranks in fp32, in the order of the ranks, block by block so that operands stay in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements: 256 KiB of fp32


def add_sum(out: Tensor, sources: Sequence[Tensor], first: bool) -> None:
    """Add the sum of `sources`, in their order, to `out`; replace `out` if `first`. All flat; `out` is fp32 or fp64."""
    scratch = out.new_empty(min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        target = out[start:stop]
        total = target if first else scratch[: stop - start]
        pieces = [source[start:stop] for source in sources]
        if len(pieces) > 1 and pieces[0].dtype == out.dtype:
            torch.add(pieces[0], pieces[1], out=total)  # in another dtype, add would round the sum to that dtype
            rest = pieces[2:]
        else:
            total.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            total.add_(piece)
        if not first:
            target.add_(total)


class RoundingNoise:
    """Noise for stochastic rounding, by the index of an element in its weight.

    The noise does not depend on the rank or the buffer that sums an element. Every host draws its own noise: equal
    roundings would add up in the sum over hosts.
    """

    def __init__(self, step: int, micro_batch: int, host: int) -> None:
        digest = hashlib.sha256(f"{step}:{micro_batch}:{host}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        draw = torch.randint(0, 1 << 16, (_BLOCK,), dtype=torch.int32, generator=generator)
        self._values = draw.repeat(2)

    def at(self, index: int, count: int) -> Tensor:
        """Return the noise of `count` elements from `index` on, at most a block. int32 [count]."""
        return self._values[index % _BLOCK :][:count]

    def for_rows(self, rows: Tensor, width: int) -> Tensor:
        """Return the noise of embedding rows. int32 [rows, width].

        It differs from that of `at` for the same elements: for a tied embedding the gradients of the head and of the
        embedding are added one after the other, and equal noise would make both round in the same direction.
        """
        return self._values[((rows * width)[:, None] + torch.arange(width) + _BLOCK // 2) % _BLOCK]


def add_sum_rounded(
    out: Tensor, sources: Sequence[Tensor], first: bool, noise: RoundingNoise | None, index: int = 0
) -> None:
    """Sum like `add_sum` in fp32, and round once to `out`, which is bf16.

    Adding to an earlier sum rounds that sum again. `noise` rounds up with a probability that follows from the distance,
    so that small contributions to a large sum are not lost. The first sum is rounded to nearest, ties to even: sums of
    a few bf16 numbers often are ties, and rounding them away from zero would enlarge all of them.

    Args:
        index: of the first element of `out` in its weight.
    """
    scratch = torch.empty(2, min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        target, total, before = out[start:stop], scratch[0, : stop - start], scratch[1, : stop - start]
        total.copy_(sources[0][start:stop])
        for source in sources[1:]:
            total.add_(source[start:stop])
        if not first:
            total.add_(before.copy_(target))
        if not first and noise is not None:
            _round(total, noise.at(index + start, stop - start))
        target.copy_(total)


def add_rows_rounded(
    out: Tensor, rows: Tensor, values: Tensor, first: bool, noise: RoundingNoise | None, first_row: int
) -> None:
    """Add `values`, fp32 [rows, width], to distinct `rows` of `out`, rounded as by `add_sum_rounded`.

    Args:
        first_row: the row of the weight that is row 0 of `out`.
    """
    width = out.shape[1]
    chunk_rows = max(1, _BLOCK // width)
    chunks = zip(torch.split(rows, chunk_rows), torch.split(values.float(), chunk_rows), strict=True)
    for chunk, total in chunks:
        if not first:
            total = total + out[chunk]
            if noise is not None:
                _round(total, noise.for_rows(first_row + chunk, width))
        out[chunk] = total.to(out.dtype)


def _round(values: Tensor, noise: Tensor) -> None:
    """Round fp32 in place to a bf16 value: add noise below the last remaining bit, then clear the lower bits."""
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)
