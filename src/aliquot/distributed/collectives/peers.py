"""The ranks of one host, connected by socket pairs: one-byte tokens to wait for each other, descriptors for memory.

A token wakes a sleeping peer, orders memory on any CPU (a system call lies between the writes before it and the reads
after it), and a peer that has died is an end of file, at once. Nothing has a name in the file system.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from aliquot.core.boot import boot_id
from aliquot.distributed.collectives.shared_memory import Memory

_SPIN_S = 50e-6  # most waits are shorter than what it costs to sleep
_JOIN_TIMEOUT_S = 300.0
_BARRIER, _DESCRIPTOR = 0, 255  # the other kinds of token are free for the users of a group


class PeerLost(ConnectionError):
    """A rank of this host has ended, or could not be reached: an echo of whatever ended it."""


def host_identity() -> str:
    """The same for two processes exactly if they can reach each other's abstract sockets: one kernel, one network."""
    return f"{boot_id()}:{Path('/proc/self/ns/net').stat().st_ino}"


class Peers:
    """Members 0 .. size - 1 of a group, of which this process is `index`. All members make the same calls in order."""

    def __init__(self, index: int, sockets: dict[int, socket.socket], ranks: Sequence[int]) -> None:
        self.index = index
        self.size = len(sockets) + 1
        self.ranks = tuple(ranks)  # the global rank of each member, for messages
        self._sockets = sockets
        self._received: dict[int, Counter[int]] = {peer: Counter() for peer in sockets}
        self._descriptors: dict[int, deque[int]] = {peer: deque() for peer in sockets}
        self.sent: Counter[int] = Counter()  # tokens of each kind, to every other member
        self.waited_s = 0.0  # for other members, since the group was made
        for connection in sockets.values():
            connection.setblocking(True)

    @classmethod
    def join(cls, rank: int, gather: Callable[[Any], list[Any]], identity: str | None = None) -> Self:
        """Find the ranks of this host among all ranks and connect to each. Collective over all ranks.

        `gather` returns every rank's JSON value, by rank. Raises PeerLost if a member does not come.
        """
        identity = identity or host_identity()
        hosts = gather(identity)
        ranks = [r for r, host in enumerate(hosts) if host == identity]
        index, secret = ranks.index(rank), secrets.token_hex(16)
        listener = None
        if index == 0 and len(ranks) > 1:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(f"\0aliquot-{secret}")  # an abstract name: it is gone with the socket
            listener.listen(len(ranks))
        secret = gather(secret)[ranks[0]]
        try:
            if len(ranks) == 1:
                return cls(0, {}, ranks)
            sockets = _introduce(listener, ranks) if listener is not None else _be_introduced(index, ranks, secret)
        except (OSError, EOFError, struct.error) as error:
            raise PeerLost(f"rank {rank}: the ranks of this host could not be connected: {error}") from error
        finally:
            if listener is not None:
                listener.close()
        return cls(index, sockets, ranks)

    def subgroup(self, members: Sequence[int]) -> Peers | None:
        """A group of its own among `members`, in their order; None for those outside. Collective over this group."""
        self.barrier()
        if self.index not in members:
            return None
        sockets: dict[int, socket.socket] = {}
        own = members.index(self.index)
        for other, member in enumerate(members):
            if other > own:
                ours, theirs = socket.socketpair()
                socket.send_fds(self._sockets[member], [bytes((_DESCRIPTOR,))], [theirs.fileno()])
                theirs.close()
                sockets[other] = ours
        for other, member in enumerate(members):
            if other < own:
                sockets[other] = socket.socket(fileno=self._receive_descriptor(member))
        return Peers(own, sockets, [self.ranks[member] for member in members])

    def share(self, own_bytes: int) -> list[Memory]:
        """Memory of each member, mapped by all; a member of 0 bytes gives none. Collective."""
        self.barrier()
        own = Memory.create(own_bytes)
        for connection in self._sockets.values():
            socket.send_fds(connection, [bytes((_DESCRIPTOR,))], [own.descriptor])
        memories = []
        for member in range(self.size):
            if member == self.index:
                memories.append(own)
                continue
            descriptor = self._receive_descriptor(member)
            memories.append(Memory(descriptor, os.fstat(descriptor).st_size))
        for memory in memories:
            memory.close_descriptor()
        return memories

    def send(self, kind: int) -> None:
        """A token of `kind` (1 .. 254) to every other member."""
        self.sent[kind] += 1
        for peer, connection in self._sockets.items():
            try:
                connection.send(bytes((kind,)))
            except OSError:
                raise self._lost(peer) from None

    def received(self, kind: int) -> int:
        """How many tokens of `kind` every other member has sent since the group was made, at least; does not wait."""
        for peer in self._sockets:
            self._receive(peer, wait=False)
        return min((counts[kind] for counts in self._received.values()), default=0)

    def wait(self, kind: int, count: int) -> None:
        """Until every other member has sent `count` tokens of `kind`. Raises PeerLost."""
        for peer, counts in self._received.items():
            begun = None
            while counts[kind] < count:
                if begun is None:
                    begun = time.perf_counter()
                    self._receive(peer, wait=False)
                else:
                    self._receive(peer, wait=time.perf_counter() > begun + _SPIN_S)
            if begun is not None:
                self.waited_s += time.perf_counter() - begun

    def barrier(self) -> None:
        """Nobody leaves before everybody has come; what was written before is seen by all after."""
        self.send(_BARRIER)
        self.wait(_BARRIER, self.sent[_BARRIER])

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._sockets = {}

    def _receive(self, peer: int, wait: bool) -> None:
        connection = self._sockets[peer]
        try:
            # Not socket.recv_fds, which leaves out the flags.
            tokens, ancillary, _, _ = connection.recvmsg(4096, socket.CMSG_SPACE(4), 0 if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            raise self._lost(peer) from None
        if not tokens:
            raise self._lost(peer)
        self._received[peer].update(tokens)
        self._descriptors[peer].extend(struct.unpack("i", data)[0] for _, _, data in ancillary)

    def _receive_descriptor(self, peer: int) -> int:
        while not self._descriptors[peer]:
            self._receive(peer, wait=True)
        return self._descriptors[peer].popleft()

    def _lost(self, peer: int) -> PeerLost:
        return PeerLost(f"rank {self.ranks[peer]} has ended, rank {self.ranks[self.index]} waits for it in vain")


def _introduce(listener: socket.socket, ranks: Sequence[int]) -> dict[int, socket.socket]:
    """As member 0: take in the others and hand each pair of them a socket pair."""
    sockets: dict[int, socket.socket] = {}
    until = time.monotonic() + _JOIN_TIMEOUT_S
    while len(sockets) < len(ranks) - 1:
        listener.settimeout(max(0.01, until - time.monotonic()))
        connection, _ = listener.accept()
        _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        member = struct.unpack("i", _exactly(connection, 4))[0] if user == os.geteuid() else -1
        if 0 < member < len(ranks) and member not in sockets:
            sockets[member] = connection
        else:
            connection.close()
    for low in range(1, len(ranks)):
        for high in range(low + 1, len(ranks)):
            pair = socket.socketpair()
            for member, end in zip((low, high), pair, strict=True):
                socket.send_fds(sockets[member], [bytes((_DESCRIPTOR,))], [end.fileno()])
                end.close()  # an end kept here would hide from one member that the other has died
    return sockets


def _be_introduced(index: int, ranks: Sequence[int], secret: str) -> dict[int, socket.socket]:
    leader = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    leader.settimeout(_JOIN_TIMEOUT_S)
    leader.connect(f"\0aliquot-{secret}")
    leader.sendall(struct.pack("i", index))
    sockets = {0: leader}
    # The pairs come in the order in which the leader makes them: for a member, by the other's number.
    for other in range(1, len(ranks)):
        if other != index:
            _, descriptors, _, _ = socket.recv_fds(leader, 1, 1)
            if not descriptors:
                raise EOFError("the first rank of this host has ended")
            sockets[other] = socket.socket(fileno=descriptors[0])
    return sockets


def _exactly(connection: socket.socket, count: int) -> bytes:
    connection.settimeout(_JOIN_TIMEOUT_S)
    received = b""
    while len(received) < count:
        more = connection.recv(count - len(received))
        if not more:
            raise EOFError("a rank ended while it joined")
        received += more
    return received
