"""Connect the ranks of one host by Unix sockets, which carry one-byte tokens and descriptors of shared memory.

A token wakes a sleeping peer. A token is also a memory barrier on any CPU: its system calls order the writes before
`send` ahead of the reads after `wait`. When a peer dies, its sockets report end of file at once. Sockets and memory
have no names in the file system.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any, Self

from aliquot.core.run_lock import namespace_id
from aliquot.distributed.collectives.shared_memory import SharedMemory

_SPIN_S = 50e-6  # most waits are shorter than the cost of sleeping
_JOIN_TIMEOUT_S = 300.0
_BARRIER, _DESCRIPTOR = 0, 255  # kinds of token; callers of `send` use 1 to 254


class PeerLost(ConnectionError):
    """Another rank has ended or cannot be reached; the error of the lost rank has the cause."""


def host_identity() -> str:
    """Return a string that is equal for two processes exactly if they share a kernel and a network namespace.

    Processes that share both can reach each other's abstract sockets.
    """
    return namespace_id("net")


class Peers:
    """The group of all ranks of one host, which are members 0 to size - 1; this process is member `index`.

    All members make the same calls in the same order.
    """

    def __init__(self, index: int, sockets: dict[int, socket.socket], ranks: Sequence[int]) -> None:
        self.index = index
        self.size = len(sockets) + 1
        self.ranks = tuple(ranks)  # the global rank of every member
        self._sockets = sockets
        self._received: dict[int, Counter[int]] = {peer: Counter() for peer in sockets}
        self._descriptors: dict[int, deque[int]] = {peer: deque() for peer in sockets}
        self.sent: Counter[int] = Counter()  # tokens that this member has sent to every peer, by kind
        self.waited_s = 0.0  # seconds of waiting for peers since the group was created
        for connection in sockets.values():
            connection.setblocking(True)

    @classmethod
    def join(cls, rank: int, gather: Callable[[Any], list[Any]], identity: str | None = None) -> Self:
        """Find the ranks of this host among all ranks and connect to them. Collective over all ranks. Raises PeerLost.

        `gather` returns the JSON values of all ranks, by rank. `identity` identifies the host; by default
        `host_identity()`.
        """
        identity = identity or host_identity()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            name = f"\0aliquot-{secrets.token_hex(16)}"
            listener.bind(name)  # an abstract name, which ends with the socket
            listener.listen(socket.SOMAXCONN)
            entries = gather([identity, name])  # all members listen when they have gathered
            ranks = [r for r, (host, _) in enumerate(entries) if host == identity]
            index = ranks.index(rank)
            try:
                sockets = _connect_members(listener, index, [entries[r][1] for r in ranks])
            except (OSError, struct.error) as error:
                raise PeerLost(f"rank {rank}: the ranks of this host could not be connected: {error}") from error
        return cls(index, sockets, ranks)

    def share(self, size_bytes: int) -> list[SharedMemory]:
        """Create shared memory of `size_bytes` (0 is allowed), and map the shared memory of every member. Collective.

        Returns the shared memory of every member, by member.
        """
        self.barrier()
        created = SharedMemory.create(size_bytes)
        for connection in self._sockets.values():
            socket.send_fds(connection, [bytes((_DESCRIPTOR,))], [created.descriptor])
        memories = []
        for member in range(self.size):
            if member == self.index:
                memories.append(created)
                continue
            while not self._descriptors[member]:
                self._receive(member, wait=True)
            descriptor = self._descriptors[member].popleft()
            memories.append(SharedMemory(descriptor, os.fstat(descriptor).st_size))
        for memory in memories:
            os.close(memory.descriptor)  # every peer has got it, and the memory stays mapped
        return memories

    def send(self, kind: int) -> None:
        """Send a token of `kind` (1 to 254) to every peer."""
        self.sent[kind] += 1
        for peer, connection in self._sockets.items():
            try:
                connection.send(bytes((kind,)))
            except OSError:
                raise self._lost(peer) from None

    def received(self, kind: int) -> int:
        """Return the number of tokens of `kind` that every peer has sent (the minimum over peers). Does not wait."""
        for peer in self._sockets:
            self._receive(peer, wait=False)
        return min((counts[kind] for counts in self._received.values()), default=0)

    def wait(self, kind: int, count: int) -> None:
        """Wait until every peer has sent `count` tokens of `kind` since the group was created. Raises PeerLost."""
        for peer, counts in self._received.items():
            if counts[kind] >= count:
                continue
            start = time.perf_counter()
            while counts[kind] < count:
                self._receive(peer, wait=time.perf_counter() > start + _SPIN_S)
            self.waited_s += time.perf_counter() - start

    def barrier(self) -> None:
        """Wait until all members have called this. Writes before the barrier are visible to all members after it."""
        self.send(_BARRIER)
        self.wait(_BARRIER, self.sent[_BARRIER])

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets = {}

    def _receive(self, peer: int, wait: bool) -> None:
        connection = self._sockets[peer]
        try:
            # recvmsg instead of socket.recv_fds, which ignores flags.
            tokens, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4), 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            raise self._lost(peer) from None
        if not tokens:
            raise self._lost(peer)
        self._received[peer].update(tokens)
        self._descriptors[peer].extend(struct.unpack("i", data)[0] for _, _, data in ancillary)

    def _lost(self, peer: int) -> PeerLost:
        return PeerLost(f"rank {self.ranks[peer]} has ended, rank {self.ranks[self.index]} waits for it in vain")


def _connect_members(listener: socket.socket, index: int, names: Sequence[str]) -> dict[int, socket.socket]:
    """Connect to the members before member `index`, and accept the members after it. `names`: where members listen."""
    sockets: dict[int, socket.socket] = {}
    for member in range(index):
        sockets[member] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sockets[member].connect(names[member])
        sockets[member].sendall(struct.pack("i", index))
    until = time.monotonic() + _JOIN_TIMEOUT_S
    while len(sockets) < len(names) - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        connection.settimeout(_JOIN_TIMEOUT_S)
        # A Unix socket delivers as a whole what was sent at once.
        member = struct.unpack("i", connection.recv(4))[0] if user == os.geteuid() else -1
        if index < member < len(names) and member not in sockets:
            sockets[member] = connection
        else:
            connection.close()
    return sockets
