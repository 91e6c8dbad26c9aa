"""Between hosts: a true reduce-scatter and an all-gather, each byte crossing the wire once per host.

gloo's own reduce-scatter is an all-reduce, twice the traffic. Here rank l of each host exchanges with rank l of every
other host: it sends what the other owns and receives what it owns itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE_BYTES = 16 << 20
_AHEAD = 2  # pieces under way while one is summed


class Summed(Protocol):
    """Flat sums of one dtype for every host, which are exchanged in pieces."""

    dtype: torch.dtype

    def pieces(self, h: int, most_bytes: int) -> list[int]:
        """The elements of each piece of what is for host h; on every host the same."""
        ...

    def visit(self, h: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        """Those pieces one by one; with `changes` each is to be changed before the next is asked for."""
        ...


class TensorSums:
    """`of[h]`: flat tensors for host h, in memory."""

    def __init__(self, of: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self._of = of
        self.dtype = dtype

    def pieces(self, h: int, most_bytes: int) -> list[int]:
        return [piece.numel() for piece in self.visit(h, most_bytes, changes=False)]

    def visit(self, h: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        for tensor in self._of[h]:
            if tensor.numel():
                yield from torch.split(tensor, max(1, most_bytes // self.dtype.itemsize))


class Wire:
    """`ranks[h]` is the global rank on host h that this rank exchanges with; `own` is this rank's host."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self._ranks = ranks
        self._own = own
        self._others = [host for host in range(len(ranks)) if host != own]
        self.sent_bytes = 0
        self.busy_s = 0.0  # in the two collectives, waiting for other hosts included

    def reduce_scatter(self, sums: Summed) -> None:
        """What `sums` has for this host becomes the sum over all hosts, in their order."""
        begun = time.perf_counter()
        own = sums.visit(self._own, _PIECE_BYTES, changes=True)
        to_come = deque(sums.pieces(self._own, _PIECE_BYTES))
        # A peer's own pieces may be more or fewer than these: each side cuts what it sends as the receiver does.
        outgoing = {host: sums.visit(host, _PIECE_BYTES, changes=False) for host in self._others}
        arriving: deque[list[tuple[int, Tensor, dist.Work]]] = deque()
        sending: deque[list[tuple[Tensor, dist.Work]]] = deque()
        # Both sides have posted their sends and receives of a round before they wait for an earlier one.
        while to_come or outgoing:
            if to_come:
                numel = to_come.popleft()
                rooms = [(host, torch.empty(numel, dtype=sums.dtype)) for host in self._others]
                arriving.append([(host, room, self._receive(room, host)) for host, room in rooms])
            leaving = {host: next(pieces, None) for host, pieces in outgoing.items()}
            sending.append([(piece, self._send(piece, host)) for host, piece in leaving.items() if piece is not None])
            outgoing = {host: pieces for host, pieces in outgoing.items() if leaving[host] is not None}
            if len(arriving) > _AHEAD:
                self._add(next(own), arriving.popleft())
            if len(sending) > _AHEAD:
                _wait(sending.popleft())
        for received in arriving:
            self._add(next(own), received)
        for sent in sending:
            _wait(sent)
        for _ in own:  # nothing is left; what was changed last is written where it lies
            pass
        self.busy_s += time.perf_counter() - begun

    def all_gather(self, own: Sequence[Tensor], others: Sequence[Sequence[Tensor]]) -> None:
        """Every host gets `own`, flat tensors; what host h has is received into `others[h]`."""
        begun = time.perf_counter()
        works = [self._send(tensor, host) for host in self._others for tensor in own if tensor.numel()]
        works += [self._receive(room, host) for host in self._others for room in others[host] if room.numel()]
        for work in works:
            work.wait()
        self.busy_s += time.perf_counter() - begun

    def _send(self, tensor: Tensor, host: int) -> dist.Work:
        self.sent_bytes += tensor.nbytes
        work = dist.isend(_bytes(tensor), self._ranks[host])
        assert work is not None
        return work

    def _receive(self, room: Tensor, host: int) -> dist.Work:
        work = dist.irecv(_bytes(room), self._ranks[host])
        assert work is not None
        return work

    def _add(self, own: Tensor, received: Sequence[tuple[int, Tensor, dist.Work]]) -> None:
        parts: dict[int, Tensor] = {self._own: own}
        for host, values, work in received:
            work.wait()
            parts[host] = values
        ordered = [parts[host] for host in sorted(parts)]
        for values in ordered[1:]:
            ordered[0].add_(values)
        if ordered[0] is not own:
            own.copy_(ordered[0])


def _wait(sent: Sequence[tuple[Tensor, dist.Work]]) -> None:
    for _, work in sent:
        work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    """gloo sends bytes, whatever they mean."""
    return tensor.view(torch.uint8)
