"""Sum gradients over the ranks of a host and over hosts, in a fixed order.

The sum over the ranks of a host is in fp32, block by block, so that operands stay in the CPU cache. The sum over hosts
is a reduce-scatter implemented here: gloo implements reduce-scatter as an all-reduce, which sends twice the bytes.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import Tensor

from aliquot.distributed.collectives.wire import Tally, Wire

_PIECE_BYTES = 16 << 20  # the largest message between hosts
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


class HostSums(Protocol):
    """The sums that this rank has computed for every host, as flat pieces that the hosts exchange."""

    sent_dtype: torch.dtype

    def pieces(self, host: int, most_bytes: int) -> list[int]:
        """Return the number of elements of every piece for `host`; all hosts cut the same pieces."""
        ...

    def visit(self, host: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        """Yield the pieces for `host` in `sent_dtype`.

        With `changes`, the caller changes a piece in place before it takes the next piece. The pieces may then have a
        more precise dtype than `sent_dtype`.
        """
        ...


class TensorSums:
    """`HostSums` that are flat tensors in memory."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self._tensors = tensors
        self.sent_dtype = dtype

    def pieces(self, host: int, most_bytes: int) -> list[int]:
        return [piece.numel() for piece in self.visit(host, most_bytes, changes=False)]

    def visit(self, host: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        for tensor in self._tensors[host]:
            if tensor.numel():
                yield from torch.split(tensor, max(1, most_bytes // self.sent_dtype.itemsize))


def reduce_scatter(wire: Wire, sums: HostSums, ahead: int) -> None:
    """Replace the sums for this host by the sums over all hosts, added in the order of the hosts.

    While one piece is summed, `ahead` pieces per host are in transit. Raises SelfTestError if values arrive corrupted.
    """
    sent, received = ({host: Tally() for host in wire.peer_hosts} for _ in range(2))
    local = sums.visit(wire.host, _PIECE_BYTES, changes=True)
    expected = deque(sums.pieces(wire.host, _PIECE_BYTES))
    # A sender cuts the sums for a host into the same pieces as that host. Hosts may have different numbers of pieces.
    outgoing = {host: sums.visit(host, _PIECE_BYTES, changes=False) for host in wire.peer_hosts}
    arriving: deque[dict[int, tuple[Tensor, Future[None]]]] = deque()
    sending: deque[list[Future[None]]] = deque()
    # Both sides post the sends and receives of a round before they wait for an earlier round.
    while expected or outgoing:
        if expected:
            numel = expected.popleft()
            buffers = {host: torch.empty(numel, dtype=sums.sent_dtype) for host in wire.peer_hosts}
            arriving.append({host: (buffer, wire.receive(buffer, host)) for host, buffer in buffers.items()})
        leaving = {host: next(pieces, None) for host, pieces in outgoing.items()}
        sending.append([])
        for host, piece in leaving.items():
            if piece is not None:
                sent[host].add(piece)
                sending[-1].append(wire.send(piece, host))
        outgoing = {host: pieces for host, pieces in outgoing.items() if leaving[host] is not None}
        if len(arriving) > ahead:
            _add_arrivals(wire, next(local), arriving.popleft(), received)
        if len(sending) > ahead:
            wire.wait_all(sending.popleft())
    for arrivals in arriving:
        _add_arrivals(wire, next(local), arrivals, received)
    for transfers in sending:
        wire.wait_all(transfers)
    for _ in local:  # yields nothing more, but lets `visit` store the last changed piece
        pass
    wire.compare(sent, received)


def _add_arrivals(
    wire: Wire, local: Tensor, arrivals: Mapping[int, tuple[Tensor, Future[None]]], received: Mapping[int, Tally]
) -> None:
    for host, (buffer, arrives) in arrivals.items():
        wire.wait(arrives)
        received[host].add(buffer)
    add_hosts(local, wire.host, {host: buffer for host, (buffer, _) in arrivals.items()})


def add_hosts(local: Tensor, local_host: int, received: dict[int, Tensor]) -> None:
    """Replace `local`, the values of `local_host`, by the sum over all hosts, added in the order of the hosts.

    Received values may be bf16. If `local` is bf16 as well, the sum is in fp32 and is rounded once.
    """
    ordered = [received.get(host, local) for host in sorted({*received, local_host})]
    total = ordered[0].to(torch.float32 if local.dtype == torch.bfloat16 else local.dtype)
    for values in ordered[1:]:
        total.add_(values)
    local.copy_(total)  # copies nothing if `total` is `local`
