"""Pieces of memory that every rank of a host fills and all read: how gradients leave a rank to be summed.

Each rank has a ring of the same size and stages the same pieces in it, in the same order. A piece is read when all have
published it, and its room is used again when all have read it, so that ranks may be apart by as much as the ring holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import aligned
from aliquot.distributed.collectives.peers import Peers

PUBLISHED, READ = 1, 2  # kinds of token
# A socket buffers some 250 tokens before sending blocks; two ranks that block on each other would wait for ever.
_MOST_AHEAD = 64
_POLL_S = 1e-4


@dataclass(frozen=True)
class Piece:
    """Where one piece lies in every rank's ring."""

    number: int
    start: int  # bytes in the ring
    size_bytes: int


class Ring:
    """`reader` of a piece is called once with the piece, in order, when every rank has published it."""

    def __init__(self, peers: Peers, size_bytes: int) -> None:
        """Collective over `peers`. The largest piece must fit."""
        self._peers = peers
        self.size_bytes = aligned(size_bytes)
        self._memories = peers.share(self.size_bytes)
        self._staged = peers.sent[PUBLISHED]  # pieces begun so far, in this ring and those that the group had before
        self._head = 0  # where the next piece begins
        self._unread: deque[tuple[Piece, Callable[[Piece], None]]] = deque()  # published by this rank
        self._held: deque[Piece] = deque()  # read here, perhaps not yet by all
        self.reading_s = 0.0  # in readers, since the ring was made
        # Called while this rank waits for others of its host, which may wait, through other hosts, for what it does.
        self.beside: Callable[[], None] | None = None

    def stage(self, size_bytes: int) -> Piece:
        """Room for the next piece; reads others' pieces while it waits for it. Raises PeerLost."""
        size_bytes = aligned(size_bytes)
        if size_bytes > self.size_bytes:
            raise ValueError(f"a piece of {size_bytes} bytes does not fit a ring of {self.size_bytes}")
        start = self._head if self._head + size_bytes <= self.size_bytes else 0
        while self._blocks(start, size_bytes):
            self._free_oldest()
        self._head = start + size_bytes
        self._staged += 1
        return Piece(self._staged, start, size_bytes)

    def view(self, piece: Piece, rank: int, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> Tensor:
        """What `rank` has staged, from element `start` of `dtype` on."""
        return self._memories[rank].tensor(piece.start + start * dtype.itemsize, shape, dtype)

    def own(self, piece: Piece, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """This rank's room, to be filled before it is published."""
        return self.view(piece, self._peers.index, dtype, 0, shape)

    def publish(self, piece: Piece, reader: Callable[[Piece], None]) -> None:
        """The piece is filled. Reads whatever all ranks have published by now."""
        self._peers.send(PUBLISHED)
        self._unread.append((piece, reader))
        self.read_published()

    def read_published(self) -> None:
        """Read whatever all ranks have published by now."""
        published = self._peers.received(PUBLISHED) if self._peers.size > 1 else self._staged
        while self._unread and self._unread[0][0].number <= published:
            self._read_oldest()

    def drain(self) -> None:
        """Read all that this rank has published, waiting for the others to publish it too."""
        while self._unread:
            self._wait(PUBLISHED, self._unread[0][0].number)
            self._read_oldest()

    def _wait(self, kind: int, count: int) -> None:
        if self.beside is not None:
            begun = time.perf_counter()
            while self._peers.size > 1 and self._peers.received(kind) < count:
                self.beside()
                time.sleep(_POLL_S)
            self._peers.waited_s += time.perf_counter() - begun
        self._peers.wait(kind, count)

    def _blocks(self, start: int, size_bytes: int) -> bool:
        """Whether a piece that may still be read lies in [start, start + size_bytes), or too many are under way."""
        waiting = [*self._held, *(piece for piece, _ in self._unread)]
        return len(waiting) >= _MOST_AHEAD or any(
            piece.start < start + size_bytes and start < piece.start + piece.size_bytes for piece in waiting
        )

    def _free_oldest(self) -> None:
        if not self._held:
            self._wait(PUBLISHED, self._unread[0][0].number)
            self._read_oldest()
        self._wait(READ, self._held[0].number)
        self._held.popleft()

    def _read_oldest(self) -> None:
        piece, reader = self._unread.popleft()
        begun = time.perf_counter()
        reader(piece)
        self.reading_s += time.perf_counter() - begun
        self._peers.send(READ)
        self._held.append(piece)
