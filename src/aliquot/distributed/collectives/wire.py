"""Transfers between hosts: local rank l of a host exchanges messages with local rank l of every other host.

The reduce-scatter of gloo is an all-reduce, with twice the traffic, so this module has its own. Two ranks use several
connections in turn, because a cloud's network gives one connection only a part of a host's bandwidth.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.distributed.collectives.messages import Tally, corruption_error
from aliquot.distributed.collectives.peers import PeerLost

_PIECE_BYTES = 16 << 20
_CONNECTIONS = 4  # between two hosts, at least
_PROBE_S = 2.0  # of waiting, before this rank probes whether the other hosts are alive
_MAX_PROBE_S = 8.0  # between two probes of a long wait
_PROBES = 10  # within _PROBE_S after a failure, because not all connections end at the same moment
_TIMEOUT = timedelta(hours=24)  # the watchdog, or the end of the peer, ends a wait earlier


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


class Transfers:
    """Futures of transfers, completed in order by a thread, because gloo only offers a blocking wait."""

    def __init__(self, name: str) -> None:
        self._pending: SimpleQueue[tuple[dist.Work, Future[None], Exception] | None] = SimpleQueue()
        # A daemon thread, because the transfers of a rank that ends by an error may never complete.
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def add(self, work: dist.Work, lost: Exception) -> Future[None]:
        """Return a future that completes with `work`, and raises `lost` if the transfer fails."""
        future: Future[None] = Future()
        self._pending.put((work, future, lost))
        return future

    def close(self) -> None:
        """Wait for all transfers, and end the thread."""
        self._pending.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (transfer := self._pending.get()) is not None:
            work, future, lost = transfer
            try:
                work.wait()
            except Exception as error:  # raised where somebody waits for the transfer
                lost.__cause__ = error
                future.set_exception(lost)
            else:
                future.set_result(None)
            del transfer, work, future, lost  # hold no tensor longer than its transfer takes


class Wire:
    """Connections of this rank to its counterparts on other hosts."""

    def __init__(self, ranks: Sequence[int], host: int, ranks_per_host: int) -> None:
        """Connect. Collective over `ranks`.

        Args:
            ranks: the global rank of the counterpart on every host.
            host: this rank's host, an index of `ranks`.
        """
        self.host = host
        self.peer_hosts = [peer for peer in range(len(ranks)) if peer != host]
        self.sent_bytes = 0
        self.waited_s = 0.0  # for other hosts, while there was no other work
        self._ranks = ranks
        self._groups = [
            dist.new_group(sorted(ranks), _TIMEOUT, "gloo", use_local_synchronization=True)
            for _ in range(-(-_CONNECTIONS // ranks_per_host))
        ]
        # gloo does not interrupt a wait for the rest of a message whose sender has ended, but it fails a new send. So a
        # rank that waits long sends probes, which nobody receives, on a separate connection.
        self._probe_group = dist.new_group(sorted(ranks), _TIMEOUT, "gloo", use_local_synchronization=True)
        self._probes: list[dist.Work] = []
        self._probed_at = 0.0
        self._sent: Counter[int] = Counter()  # messages to every host
        self._received: Counter[int] = Counter()
        self._sending, self._receiving = Transfers("aliquot-sends"), Transfers("aliquot-receives")

    def send(self, tensor: Tensor, host: int) -> Future[None]:
        """Send `tensor`, which must not change until the future is done. Both may raise PeerLost."""
        self.sent_bytes += tensor.nbytes
        with self._reaching(host) as lost:
            work = dist.isend(_bytes(tensor), self._ranks[host], group=self._next(self._sent, host))
            assert work is not None
            return self._sending.add(work, lost)

    def receive(self, buffer: Tensor, host: int) -> Future[None]:
        """Receive the next message from `host` into `buffer`, which may be longer. Raises PeerLost like `send`."""
        with self._reaching(host) as lost:
            work = dist.irecv(_bytes(buffer), self._ranks[host], group=self._next(self._received, host))
            assert work is not None
            return self._receiving.add(work, lost)

    def wait(self, transfer: Future[None]) -> None:
        """Wait for a transfer. Raises PeerLost if the rank at the other end has ended."""
        start = time.monotonic()
        while not wait([transfer], _PROBE_S).done:
            self.probe(start)
        transfer.result()
        self.waited_s += time.monotonic() - start

    def probe(self, idle_since: float) -> None:
        """Raise PeerLost if another host has ended. Call this repeatedly in a wait; short waits send nothing.

        Args:
            idle_since: when the last message came or went, of time.monotonic().
        """
        now = time.monotonic()
        # The interval doubles during one wait, because gloo keeps a kilobyte for every probe.
        interval = min(max(_PROBE_S, self._probed_at - idle_since), _MAX_PROBE_S)
        if now >= max(idle_since, self._probed_at) + interval:
            self._probed_at = now
            self._send_probes()

    @contextmanager
    def name_lost_host(self) -> Iterator[None]:
        """Wrap a collective over all ranks: if gloo fails because a host has ended, raise PeerLost with its rank."""
        try:
            yield
        except RuntimeError:
            for _ in range(_PROBES):
                self._send_probes()
                time.sleep(_PROBE_S / _PROBES)
            raise

    def _send_probes(self) -> None:
        for host in self.peer_hosts:
            with self._reaching(host):
                work = dist.isend(torch.zeros(1, dtype=torch.uint8), self._ranks[host], group=self._probe_group)
                assert work is not None
                self._probes.append(work)

    def reduce_scatter(self, sums: HostSums, ahead: int) -> None:
        """Replace the sums for this host by the sums over all hosts, added in the order of the hosts.

        Args:
            ahead: pieces per host that are under way while one piece is summed.

        Raises:
            SelfTestError: received values differ from those that were sent.
        """
        sent, received = ({host: Tally() for host in self.peer_hosts} for _ in range(2))
        local = sums.visit(self.host, _PIECE_BYTES, changes=True)
        expected = deque(sums.pieces(self.host, _PIECE_BYTES))
        # The number of pieces may differ between hosts: a sender cuts them as the receiver does.
        outgoing = {host: sums.visit(host, _PIECE_BYTES, changes=False) for host in self.peer_hosts}
        arriving: deque[dict[int, tuple[Tensor, Future[None]]]] = deque()
        sending: deque[list[Future[None]]] = deque()
        # Both sides post the sends and receives of a round before they wait for an earlier round.
        while expected or outgoing:
            if expected:
                numel = expected.popleft()
                buffers = {host: torch.empty(numel, dtype=sums.sent_dtype) for host in self.peer_hosts}
                arriving.append({host: (buffer, self.receive(buffer, host)) for host, buffer in buffers.items()})
            leaving = {host: next(pieces, None) for host, pieces in outgoing.items()}
            sending.append([])
            for host, piece in leaving.items():
                if piece is not None:
                    sent[host].add(piece)
                    sending[-1].append(self.send(piece, host))
            outgoing = {host: pieces for host, pieces in outgoing.items() if leaving[host] is not None}
            if len(arriving) > ahead:
                self._add(next(local), arriving.popleft(), received)
            if len(sending) > ahead:
                self._wait_for(sending.popleft())
        for arrivals in arriving:
            self._add(next(local), arrivals, received)
        for transfers in sending:
            self._wait_for(transfers)
        for _ in local:  # no piece is left; this lets `visit` store the last changed piece
            pass
        self.compare(sent, received)

    def compare(self, sent: Mapping[int, Tally], received: Mapping[int, Tally]) -> None:
        """Raise SelfTestError unless the gradients from every host are those that it has sent. Collective."""
        buffers = {host: torch.empty(1, dtype=torch.int64) for host in self.peer_hosts}
        arriving = {host: self.receive(buffer, host) for host, buffer in buffers.items()}
        leaving = [self.send(sent[host].value(), host) for host in self.peer_hosts]
        for host, arrives in arriving.items():
            self.wait(arrives)
            if not torch.equal(buffers[host], received[host].value()):
                raise corruption_error(self.gradients_of(host))
        self._wait_for(leaving)

    def gradients_of(self, host: int) -> str:
        """Return a name for error messages."""
        return f"gradients of rank {self._ranks[host]}"

    def close(self) -> None:
        """Wait for all transfers, and end the threads."""
        self._sending.close()
        self._receiving.close()

    @contextmanager
    def _reaching(self, host: int) -> Iterator[PeerLost]:
        """Yield the error for a lost counterpart on `host`, and raise it if gloo, which knows only addresses, fails."""
        lost = PeerLost(
            f"rank {self._ranks[host]} has ended on another host, rank {self._ranks[self.host]} waits for it in vain"
        )
        try:
            yield lost
        except RuntimeError as error:
            raise lost from error

    def _next(self, messages: Counter[int], host: int) -> dist.ProcessGroup:
        """Return the connection of the next message: both ends count, so message n uses the same connection on both."""
        messages[host] += 1
        group: dist.ProcessGroup = self._groups[messages[host] % len(self._groups)]
        return group

    def _add(
        self, local: Tensor, arrivals: Mapping[int, tuple[Tensor, Future[None]]], received: Mapping[int, Tally]
    ) -> None:
        for host, (buffer, arrives) in arrivals.items():
            self.wait(arrives)
            received[host].add(buffer)
        add_hosts(local, self.host, {host: buffer for host, (buffer, _) in arrivals.items()})

    def _wait_for(self, sent: Sequence[Future[None]]) -> None:
        for transfer in sent:
            self.wait(transfer)


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


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because gloo does not send every dtype."""
    return tensor.view(torch.uint8)
