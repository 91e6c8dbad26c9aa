"""Transfers between hosts: local rank l of a host exchanges messages with local rank l of every other host.

A host has several connections to the other hosts, because a cloud's network gives one connection only a part of a
host's bandwidth. Two ranks use their connections in turn. The ranks compare 64-bit checksums of messages, because TCP's
16-bit checksum misses one corrupted message in 65,536.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.peers import PeerLost

_MASK = (1 << 64) - 1
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that multiplying the checksum of earlier messages loses no bit
_CONNECTIONS = 4  # smallest number of connections of a host to all other hosts
_PROBE_S = 2.0  # time that this rank waits before it probes whether the other hosts are alive
_MAX_PROBE_S = 8.0  # longest time between two probes
_PROBE_TAG = 1
_PROBES = 10  # probes within _PROBE_S after a failure, because not all connections end at the same moment
_TIMEOUT = timedelta(hours=24)  # the watchdog, or the end of the peer, ends a wait earlier


class BufferPool:
    """A pool of message buffers of one dtype, which keeps at most `limit_bytes` of free buffers."""

    def __init__(self, dtype: torch.dtype, limit_bytes: int) -> None:
        self._dtype = dtype
        self._limit_bytes = limit_bytes
        self._free: dict[int, list[Tensor]] = {}  # by number of elements
        self._free_bytes = 0

    def take(self, numel: int) -> Tensor:
        """Return a free buffer of `numel` elements, or a new one."""
        if not self._free.get(numel):
            self._drop(numel * self._dtype.itemsize)
            return torch.empty(numel, dtype=self._dtype)
        buffer = self._free[numel].pop()
        self._free_bytes -= buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Return a buffer to the pool after the buffer's transfer is complete."""
        if self._free_bytes + buffer.nbytes <= self._limit_bytes:
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._free_bytes += buffer.nbytes

    def _drop(self, size_bytes: int) -> None:
        """Free pooled buffers of at least `size_bytes` if possible, because a new buffer needs as much memory."""
        while size_bytes > 0 and self._free_bytes:
            dropped = next(buffers for buffers in self._free.values() if buffers).pop()
            self._free_bytes -= dropped.nbytes
            size_bytes -= dropped.nbytes


def checksum(values: npt.NDArray[Any]) -> int:
    """Return the sum, modulo 2^64, of a contiguous array's bytes as 64-bit integers.

    If the size is no multiple of 8 bytes, the last bytes count as one integer.
    """
    data = values.view(np.uint8)
    words = len(data) // 8 * 8
    total = int(np.add.reduce(data[:words].view(np.uint64)))
    rest = int.from_bytes(data[words:].tobytes(), "little") if words < len(data) else 0
    return total + rest & _MASK


class Tally:
    """A running checksum of a sequence of messages, which depends on their order."""

    def __init__(self) -> None:
        self._total = 0

    def add(self, message: Tensor) -> None:
        """Include a flat message of any dtype."""
        self._total = self._total * _FACTOR + checksum(message.view(torch.uint8).numpy()) & _MASK

    def value(self) -> Tensor:
        """Return the checksum as int64 [1], to be sent."""
        return torch.from_numpy(np.array([self._total], np.uint64).view(np.int64))


def corruption_error(values: str) -> SelfTestError:
    """Return the error for `values` ("gradients of rank 3") that arrived corrupted."""
    return SelfTestError(f"{values} differ from the values that were sent: broken network, memory or torch?")


class Transfers:
    """Futures of transfers. A thread completes the futures in order, because gloo only offers a blocking wait."""

    def __init__(self, name: str) -> None:
        self._pending: SimpleQueue[tuple[dist.Work, Future[None], Exception] | None] = SimpleQueue()
        # A daemon thread, because the transfers of a rank that ends by an error may never complete.
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def add(self, work: dist.Work | None, lost: Exception) -> Future[None]:
        """Return a future that completes with `work`, and raises `lost` if the transfer fails.

        torch returns None only to a rank outside of the group.
        """
        future: Future[None] = Future()
        self._pending.put((cast("dist.Work", work), future, lost))
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
            except Exception as error:  # raised in the thread that waits for the future
                lost.__cause__ = error
                future.set_exception(lost)
            else:
                future.set_result(None)
            del transfer, work, future, lost  # release the tensor when its transfer is complete


@cache
def connect_groups(ranks: tuple[int, ...], count: int) -> list[dist.ProcessGroup]:
    """Return `count` process groups of gloo with separate connections between `ranks`. Collective over `ranks`.

    Every group has three threads and a connection to every rank. The start-up proof and the engine of a run therefore
    use the same groups, one after the other. `Ranks.close` clears the cache.
    """
    return [dist.new_group(list(ranks), _TIMEOUT, "gloo", use_local_synchronization=True) for _ in range(count)]


class Wire:
    """Connections of this rank to its counterparts on other hosts."""

    def __init__(self, ranks: Sequence[int], host: int, ranks_per_host: int) -> None:
        """Connect to the counterparts. Collective over `ranks`.

        Args:
            ranks: the global rank of the counterpart on every host, including this rank.
            host: the index of this rank's host.
        """
        self.host = host
        self.peer_hosts = [peer for peer in range(len(ranks)) if peer != host]
        self.sent_bytes = 0
        self.waited_s = 0.0  # seconds of waiting for other hosts without other work
        self._ranks = ranks
        connections = -(-_CONNECTIONS // (ranks_per_host * len(self.peer_hosts)))
        self._groups = connect_groups(tuple(sorted(ranks)), connections)
        # If a host ends in the middle of a message, gloo waits for the rest of the message without end. A new send to
        # that host fails, however. So a rank that waits long sends probes, with a tag that no rank receives.
        self._probes: list[dist.Work | None] = []
        self._probed_at = 0.0
        self._sent: Counter[int] = Counter()  # number of messages sent to every host
        self._received: Counter[int] = Counter()
        self._sending, self._receiving = Transfers("aliquot-sends"), Transfers("aliquot-receives")

    def send(self, tensor: Tensor, host: int) -> Future[None]:
        """Send `tensor`, which must not change until the future is done. The call and the future may raise PeerLost."""
        self.sent_bytes += tensor.nbytes
        with self._reaching(host) as lost:
            return self._sending.add(dist.isend(_bytes(tensor), self._ranks[host], self._next(self._sent, host)), lost)

    def receive(self, buffer: Tensor, host: int) -> Future[None]:
        """Receive the next message from `host` into `buffer`, which may be longer. Raises PeerLost like `send`."""
        with self._reaching(host) as lost:
            group = self._next(self._received, host)
            return self._receiving.add(dist.irecv(_bytes(buffer), self._ranks[host], group), lost)

    def wait(self, transfer: Future[None]) -> None:
        """Wait for a transfer. Raises PeerLost if the rank at the other end has ended."""
        start = time.monotonic()
        while not wait([transfer], _PROBE_S).done:
            self.probe(start)
        transfer.result()
        self.waited_s += time.monotonic() - start

    def probe(self, idle_since: float) -> None:
        """Raise PeerLost if another host has ended. Call this repeatedly during a wait; short waits send nothing.

        `idle_since` is the time, by time.monotonic(), since which this rank has sent and received no message.
        """
        now = time.monotonic()
        # The interval between probes doubles during one wait, because gloo keeps a kilobyte for every probe.
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
                probe = torch.zeros(1, dtype=torch.uint8)
                self._probes.append(dist.isend(probe, self._ranks[host], self._groups[0], _PROBE_TAG))

    def compare(self, sent: Mapping[int, Tally], received: Mapping[int, Tally]) -> None:
        """Raise SelfTestError unless the received gradients have the checksums of the senders. Collective."""
        buffers = {host: torch.empty(1, dtype=torch.int64) for host in self.peer_hosts}
        arriving = {host: self.receive(buffer, host) for host, buffer in buffers.items()}
        leaving = [self.send(sent[host].value(), host) for host in self.peer_hosts]
        for host, arrives in arriving.items():
            self.wait(arrives)
            if not torch.equal(buffers[host], received[host].value()):
                raise corruption_error(self.gradients_of(host))
        self.wait_all(leaving)

    def gradients_of(self, host: int) -> str:
        """Return a name of the gradients from `host`, for error messages."""
        return f"gradients of rank {self._ranks[host]}"

    def close(self) -> None:
        """Wait for all transfers, and end the threads."""
        self._sending.close()
        self._receiving.close()

    @contextmanager
    def _reaching(self, host: int) -> Iterator[PeerLost]:
        """Yield the PeerLost error for the counterpart on `host`, and raise this error if gloo fails in the block.

        The error names the rank, because gloo's own error has only an address.
        """
        lost = PeerLost(
            f"rank {self._ranks[host]} has ended on another host, rank {self._ranks[self.host]} waits for it in vain"
        )
        try:
            yield lost
        except RuntimeError as error:
            raise lost from error

    def _next(self, messages: Counter[int], host: int) -> dist.ProcessGroup:
        """Return the connection for the next message to or from `host`.

        Both ends count their messages, so they use the same connection for message n.
        """
        messages[host] += 1
        return self._groups[messages[host] % len(self._groups)]

    def wait_all(self, sent: Sequence[Future[None]]) -> None:
        for transfer in sent:
            self.wait(transfer)


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor as bytes, because gloo does not send every dtype."""
    return tensor.view(torch.uint8)
