"""Sums over the ranks of a host and over hosts, in a fixed order.

Ranks are summed in fp32, block by block so that operands stay in the cache. The reduce-scatter of gloo is an
all-reduce, with twice the traffic, so the sum over hosts is a reduce-scatter of its own.
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

_PIECE_BYTES = 16 << 20  # of a sum, in one message between hosts
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
    """Sum like `add_sum` in fp32, and round once to `out`, bf16, whose first element is element `index` of its weight.

    Adding to an earlier sum rounds that sum again. `noise` rounds up with a probability that follows from the distance,
    so that small contributions to a large sum are not lost. The first sum is rounded to nearest, ties to even: sums of
    a few bf16 numbers often are ties, and rounding them away from zero would enlarge all of them.
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
    """Round fp32 in place to a bf16 value: add noise below the last remaining bit, then clear the lower bits."""
    values.view(torch.int32).add_(noise).bitwise_and_(-0x10000)


class HostSums(Protocol):
    """Flat sums for every host, which hosts exchange in pieces."""

    sent_dtype: torch.dtype

    def pieces(self, host: int, most_bytes: int) -> list[int]:
        """Return the number of elements of every piece for `host`, equal on all hosts."""
        ...

    def visit(self, host: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        """Yield the pieces for `host` in `sent_dtype`.

        With `changes`, the caller changes a piece before it takes the next one, and pieces may be more precise.
        """
        ...


class TensorSums:
    """Sums in memory: flat tensors by host."""

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

    While one piece is summed, `ahead` pieces per host are under way. Raises SelfTestError if values arrive changed.
    """
    sent, received = ({host: Tally() for host in wire.peer_hosts} for _ in range(2))
    local = sums.visit(wire.host, _PIECE_BYTES, changes=True)
    expected = deque(sums.pieces(wire.host, _PIECE_BYTES))
    # The number of pieces may differ between hosts: a sender cuts them as the receiver does.
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
    for _ in local:  # no piece is left; this lets `visit` store the last changed piece
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
    """Replace `local`, the values of `local_host`, by the sum over all hosts in their order.

    Received values may be bf16. If `local` is bf16, too, the sum is rounded once.
    """
    if local.dtype == torch.bfloat16:
        total = local.float()
        add_hosts(total, local_host, received)
        local.copy_(total)
        return
    before = [received[host] for host in sorted(received) if host < local_host]
    if before:
        total = before[0].to(local.dtype)
        for values in before[1:]:
            total.add_(values)
        torch.add(total, local, out=local)
    for host in sorted(received):
        if host > local_host:
            local.add_(received[host])
