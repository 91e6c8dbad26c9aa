"""Ring buffers in shared memory, through which the ranks of a host sum their gradients.

Every rank has a ring buffer of the same size and stages the same pieces in the same order. The ranks read a piece once
all ranks have published the piece, and reuse its space once all ranks have read it. A rank can therefore be ahead of
the others by as many pieces as its ring buffer holds.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.peers import Peers

PUBLISHED, READ = 1, 2  # kinds of tokens
# Limit of pieces that a rank stages before all ranks have read the oldest. A socket buffers about 250 tokens before a
# send blocks, and two ranks whose sends block each other would deadlock.
_MOST_AHEAD = 64
_POLL_S = 1e-4


@dataclass(frozen=True)
class Piece:
    """The position of one piece, equal in the rings of all ranks."""

    number: int
    start: int  # offset in the ring buffer, in bytes
    size_bytes: int


class Ring:
    """The ring buffers of all ranks of a host, in which a rank stages, publishes and reads pieces in order."""

    def __init__(self, peers: Peers, size_bytes: int) -> None:
        """Create the ring buffers, each of which must hold the largest piece. Collective over `peers`."""
        self._peers = peers
        self.size_bytes = align(size_bytes)
        self._memories = peers.share(self.size_bytes)
        self._staged = peers.sent[PUBLISHED]  # pieces staged so far, in this ring and in earlier rings of the group
        self._head = 0  # start of the next piece
        self._unread: deque[tuple[Piece, Callable[[Piece], None]]] = deque()  # published, not yet read by this rank
        self._read: deque[Piece] = deque()  # read by this rank, perhaps not yet by all ranks
        self.reading_s = 0.0  # seconds in reader callbacks since the ring was created
        # Callback while this rank waits for peers: a peer may wait for another host that needs work of this rank.
        self.while_waiting: Callable[[], None] | None = None

    def stage(self, size_bytes: int) -> Piece:
        """Reserve space for the next piece; read published pieces until there is enough space. Raises PeerLost."""
        size_bytes = align(size_bytes)
        start = self._head if self._head + size_bytes <= self.size_bytes else 0
        while self._blocks(start, size_bytes):
            self._free_oldest()
        self._head = start + size_bytes
        self._staged += 1
        return Piece(self._staged, start, size_bytes)

    def view(self, piece: Piece, rank: int, dtype: torch.dtype, start: int, shape: tuple[int, ...]) -> Tensor:
        """Return a view of the elements of `rank` in `piece`, from element `start` on; fill it before `publish`."""
        return self._memories[rank].tensor(piece.start + start * dtype.itemsize, shape, dtype)

    def publish(self, piece: Piece, reader: Callable[[Piece], None]) -> None:
        """Publish a filled piece. `reader(piece)` is called once, after every rank has published the piece."""
        self._peers.send(PUBLISHED)
        self._unread.append((piece, reader))
        self.read_published()

    def read_published(self) -> None:
        """Read the pieces that all ranks have published so far; do not wait."""
        published = self._peers.received(PUBLISHED) if self._peers.size > 1 else self._staged
        while self._unread and self._unread[0][0].number <= published:
            self._read_oldest()

    def serve(self) -> None:
        """Do what other ranks may wait for, here or on other hosts, while this rank waits for something else."""
        self.read_published()
        if self.while_waiting is not None:
            self.while_waiting()

    def drain(self) -> None:
        """Read all pieces that this rank has published, waiting until the peers have published them too."""
        while self._unread:
            self._wait(PUBLISHED, self._unread[0][0].number)
            self._read_oldest()

    def _wait(self, kind: int, count: int) -> None:
        if self.while_waiting is not None:
            start = time.perf_counter()
            while self._peers.size > 1 and self._peers.received(kind) < count:
                self.while_waiting()
                time.sleep(_POLL_S)
            self._peers.waited_s += time.perf_counter() - start
        self._peers.wait(kind, count)

    def _blocks(self, start: int, size_bytes: int) -> bool:
        """Whether unread pieces overlap [start, start + size_bytes), or too many pieces are unread."""
        unread = [*self._read, *(piece for piece, _ in self._unread)]
        return len(unread) >= _MOST_AHEAD or any(
            piece.start < start + size_bytes and start < piece.start + piece.size_bytes for piece in unread
        )

    def _free_oldest(self) -> None:
        if not self._read:
            self._wait(PUBLISHED, self._unread[0][0].number)
            self._read_oldest()
        self._wait(READ, self._read[0].number)
        self._read.popleft()

    def _read_oldest(self) -> None:
        piece, reader = self._unread.popleft()
        start = time.perf_counter()
        reader(piece)
        self.reading_s += time.perf_counter() - start
        self._peers.send(READ)
        self._read.append(piece)
