"""Between hosts: a true reduce-scatter and an all-gather, each byte crossing the wire once per host.

gloo's own reduce-scatter is an all-reduce, twice the traffic. Here rank l of each host exchanges with rank l of every
other host: it sends what the other owns and receives what it owns itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE_BYTES = 16 << 20
_AHEAD = 2  # pieces under way while one is summed


class Wire:
    """`ranks[h]` is the global rank on host h that this rank exchanges with; `own` is this rank's host."""

    def __init__(self, ranks: Sequence[int], own: int) -> None:
        self._ranks = ranks
        self._own = own
        self._others = [host for host in range(len(ranks)) if host != own]
        self.sent_bytes = 0
        self.busy_s = 0.0  # in the two collectives, waiting for other hosts included

    def reduce_scatter(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """`gradients[h]`: flat tensors for host h. `gradients[own]` becomes the sum over all hosts, in their order."""
        begun = time.perf_counter()
        # A peer's own tensors may be shorter or longer than these: each side cuts what it sends by the receiver's size.
        outgoing = [self._send(piece, host) for host in self._others for piece in _pieces(gradients[host])]
        arriving: deque[tuple[Tensor, list[tuple[int, Tensor, dist.Work]]]] = deque()
        for own in _pieces(gradients[self._own]):
            rooms = [(host, torch.empty_like(own)) for host in self._others]
            arriving.append((own, [(host, room, self._receive(room, host)) for host, room in rooms]))
            if len(arriving) > _AHEAD:
                self._add(*arriving.popleft())
        while arriving:
            self._add(*arriving.popleft())
        for work in outgoing:
            work.wait()
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


def _pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Views of flat tensors, each of at most `_PIECE_BYTES`; none of an empty one."""
    full = (tensor for tensor in tensors if tensor.numel())
    return [piece for each in full for piece in torch.split(each, max(1, _PIECE_BYTES // each.element_size()))]


def _bytes(tensor: Tensor) -> Tensor:
    """gloo sends bytes, whatever they mean."""
    return tensor.view(torch.uint8)
