"""Sum gradients over the ranks of a host and over hosts, in a fixed order.

The sum over the ranks of a host is in fp32, block by block, so that operands stay in the CPU cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from aliquot.core.errors import SelfTestError

_BLOCK = 1 << 16  # elements: 256 KiB of fp32


def add_sum(out: Tensor, sources: Sequence[Tensor], first: bool) -> None:
    """Add the sum of `sources`, in their order, to `out`; if `first`, store the sum in `out` instead.

    All tensors are flat; `out` is fp32 or fp64.
    """
    scratch = out.new_empty(min(_BLOCK, out.numel()))
    for start in range(0, out.numel(), _BLOCK):
        stop = min(start + _BLOCK, out.numel())
        target = out[start:stop]
        total = target if first else scratch[: stop - start]
        pieces = [source[start:stop] for source in sources]
        if len(pieces) > 1 and pieces[0].dtype == out.dtype:
            torch.add(pieces[0], pieces[1], out=total)  # for another dtype, add would round to that dtype
            rest = pieces[2:]
        else:
            total.copy_(pieces[0])
            rest = pieces[1:]
        for piece in rest:
            total.add_(piece)
        if not first:
            target.add_(total)


class RoundingNoise:
    """Random bits for stochastic rounding to bf16, looked up by the index of an element in its weight.

    The noise does not depend on the rank or the buffer that sums an element. Every host draws different noise, because
    equal rounding errors would add up in the sum over hosts.
    """

    def __init__(self, step: int, micro_batch: int, host: int) -> None:
        digest = hashlib.sha256(f"{step}:{micro_batch}:{host}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        draw = torch.randint(0, 1 << 16, (_BLOCK,), dtype=torch.int32, generator=generator)
        self._values = draw.repeat(2)

    def at(self, index: int, count: int) -> Tensor:
        """Return the noise of elements `index` to `index + count` as int32 [count]; `count` is at most `_BLOCK`."""
        return self._values[index % _BLOCK :][:count]

    def for_rows(self, rows: Tensor, width: int) -> Tensor:
        """Return the noise of whole embedding rows as int32 [rows, width].

        For the same elements, this noise differs from the noise of `at`. A tied embedding adds the gradients of the
        output head and of the embedding one after the other; equal noise would round both in the same direction.
        """
        return self._values[((rows * width)[:, None] + torch.arange(width) + _BLOCK // 2) % _BLOCK]


def add_sum_rounded(
    out: Tensor, sources: Sequence[Tensor], first: bool, noise: RoundingNoise | None, index: int = 0
) -> None:
    """Sum in fp32 like `add_sum`, and round the result once to bf16 `out`.

    The first element of `out` is element `index` of its weight. Adding to an earlier sum rounds that sum again. `noise`
    makes this rounding stochastic, so that small contributions to a large sum are not lost. The first sum is rounded to
    nearest, ties to even. Sums of a few bf16 numbers often are ties, and rounding ties away from zero would enlarge
    these sums.
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
    """Add `values`, fp32 [rows, width], to distinct `rows` of `out`, and round as `add_sum_rounded` does.

    Row 0 of `out` is row `first_row` of the weight.
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
    """Round fp32 values in place to bf16 values: add noise to the lower 16 bits, then clear these bits."""
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)


def add_hosts(local: Tensor, local_host: int, received: dict[int, Tensor]) -> None:
    """Replace `local`, the values of `local_host`, by the sum over all hosts, added in the order of the hosts.

    Received values may be bf16. If `local` is bf16 as well, the sum is in fp32 and is rounded once.
    """
    ordered = [received.get(host, local) for host in sorted({*received, local_host})]
    total = ordered[0].to(torch.float32 if local.dtype == torch.bfloat16 else local.dtype)
    for values in ordered[1:]:
        total.add_(values)
    local.copy_(total)  # copies nothing if `total` is `local`


def check_result(operation: str, result: Tensor, expected: Tensor) -> None:
    """Raise SelfTestError unless `operation` on known numbers gave the flat `expected`."""
    wrong = (result != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise SelfTestError(
            f"a {operation} of known numbers gave {result[at].item()} instead of {expected[at].item()}:"
            " broken torch or memory?"
        )
