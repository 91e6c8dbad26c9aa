"""Between hosts: rank l of each host sends to rank l of every other host, and receives from it, whatever both agree on.

gloo's own reduce-scatter is an all-reduce, twice the traffic. Each pair of ranks has several connections, which take
turns: a cloud's network gives one connection a part of what it gives a host.
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

from aliquot.distributed.collectives.messages import Tally, not_as_sent
from aliquot.distributed.collectives.peers import PeerLost

_PIECE_BYTES = 16 << 20
_CONNECTIONS = 4  # of a host to each other one, at least
_ASK_S = 2.0  # of waiting, then whether the others are still there
_ASK_RARELY_S = 8.0  # of a wait that goes on
_ASK_AGAIN = 10  # times in that, where one is not: connections do not end all at the same moment
_TIMEOUT = timedelta(hours=24)  # what bounds a wait is the watchdog's clock, or the other end's end


class Summed(Protocol):
    """Flat sums for every host, which are exchanged in pieces."""

    sent_dtype: torch.dtype

    def pieces(self, h: int, most_bytes: int) -> list[int]:
        """The elements of each piece of what is for host h; on every host the same."""
        ...

    def visit(self, h: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        """Those pieces one by one, in `sent_dtype`; with `changes` each is to be changed before the next is asked for,
        and may be more precise."""
        ...


class TensorSums:
    """`of[h]`: flat tensors for host h, in memory."""

    def __init__(self, of: Sequence[Sequence[Tensor]], dtype: torch.dtype) -> None:
        self._of = of
        self.sent_dtype = dtype

    def pieces(self, h: int, most_bytes: int) -> list[int]:
        return [piece.numel() for piece in self.visit(h, most_bytes, changes=False)]

    def visit(self, h: int, most_bytes: int, changes: bool) -> Iterator[Tensor]:
        for tensor in self._of[h]:
            if tensor.numel():
                yield from torch.split(tensor, max(1, most_bytes // self.sent_dtype.itemsize))


class Transfers:
    """Each is waited for after those that were begun before it."""

    def __init__(self, name: str) -> None:
        self._begun: SimpleQueue[tuple[dist.Work, Future[None], Exception] | None] = SimpleQueue()
        # A daemon: where a rank ends by an error its peers are told by that end, and what it waits for never comes.
        self._thread = threading.Thread(target=self._wait, name=name, daemon=True)
        self._thread.start()

    def add(self, work: dist.Work, lost: Exception) -> Future[None]:
        """Done when `work` is; raises `lost` where that fails."""
        over: Future[None] = Future()
        self._begun.put((work, over, lost))
        return over

    def close(self) -> None:
        """When all are over."""
        self._begun.put(None)
        self._thread.join()

    def _wait(self) -> None:
        while (begun := self._begun.get()) is not None:
            work, over, lost = begun
            try:
                work.wait()
            except Exception as error:  # it is raised where the transfer was wanted
                lost.__cause__ = error
                over.set_exception(lost)
            else:
                over.set_result(None)
            del begun, work, over, lost


class Wire:
    """`ranks[h]` is the global rank on host h that this rank exchanges with; `own` is this rank's host."""

    def __init__(self, ranks: Sequence[int], own: int, ranks_per_host: int) -> None:
        """Collective over `ranks`."""
        self.own = own
        self.others = [host for host in range(len(ranks)) if host != own]
        self.sent_bytes = 0
        self.waited_s = 0.0  # for other hosts, by whoever could do nothing else
        self._ranks = ranks
        self._groups = [
            dist.new_group(sorted(ranks), _TIMEOUT, "gloo", use_local_synchronization=True)
            for _ in range(-(-_CONNECTIONS // ranks_per_host))
        ]
        # gloo tells nobody that waits for a message of which a part has come that the rest never will. It tells who
        # begins to send, so ranks that wait long send each other what nobody receives, on a connection of its own.
        self._alive = dist.new_group(sorted(ranks), _TIMEOUT, "gloo", use_local_synchronization=True)
        self._asked: list[dist.Work] = []
        self._asked_at = 0.0
        self._sent: Counter[int] = Counter()  # messages to each host
        self._received: Counter[int] = Counter()
        self._sending, self._receiving = Transfers("aliquot-sends"), Transfers("aliquot-receives")

    def send(self, tensor: Tensor, host: int) -> Future[None]:
        """`tensor` may be changed when it is done. Raises PeerLost, here or when it is waited for."""
        self.sent_bytes += tensor.nbytes
        with self._reaching(host) as lost:
            work = dist.isend(_bytes(tensor), self._ranks[host], group=self._next(self._sent, host))
            assert work is not None
            return self._sending.add(work, lost)

    def receive(self, room: Tensor, host: int) -> Future[None]:
        """The next message from `host`, which may be shorter than `room`. Raises PeerLost as `send`."""
        with self._reaching(host) as lost:
            work = dist.irecv(_bytes(room), self._ranks[host], group=self._next(self._received, host))
            assert work is not None
            return self._receiving.add(work, lost)

    def wait(self, transfer: Future[None]) -> None:
        """Raises PeerLost where the rank at the other end has ended."""
        begun = time.monotonic()
        while not wait([transfer], _ASK_S).done:
            self.ask(begun)
        transfer.result()
        self.waited_s += time.monotonic() - begun

    def ask(self, stood_still: float) -> None:
        """Whether the other hosts are there, where nothing has come or gone since `stood_still`, of time.monotonic().
        Raises PeerLost. To be called now and then in a wait: it does nothing while that is short."""
        now = time.monotonic()
        # Twice as long after each question of one wait: gloo keeps what nobody receives, a kilobyte each.
        interval = min(max(_ASK_S, self._asked_at - stood_still), _ASK_RARELY_S)
        if now >= max(stood_still, self._asked_at) + interval:
            self._asked_at = now
            self._ask()

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Around what is collective over all ranks: where gloo fails because a host has ended, raises PeerLost."""
        try:
            yield
        except RuntimeError:
            for _ in range(_ASK_AGAIN):
                self._ask()
                time.sleep(_ASK_S / _ASK_AGAIN)
            raise

    def _ask(self) -> None:
        for host in self.others:
            with self._reaching(host):
                work = dist.isend(torch.zeros(1, dtype=torch.uint8), self._ranks[host], group=self._alive)
                assert work is not None
                self._asked.append(work)

    def reduce_scatter(self, sums: Summed, ahead: int) -> None:
        """What `sums` has for this host becomes the sum over all hosts, in their order; of each other host so many
        pieces come, and go, while one is summed. Raises SelfTestError where what has come is not what was sent."""
        sent, received = ({host: Tally() for host in self.others} for _ in range(2))
        own = sums.visit(self.own, _PIECE_BYTES, changes=True)
        to_come = deque(sums.pieces(self.own, _PIECE_BYTES))
        # A peer's own pieces may be more or fewer than these: each side cuts what it sends as the receiver does.
        outgoing = {host: sums.visit(host, _PIECE_BYTES, changes=False) for host in self.others}
        arriving: deque[dict[int, tuple[Tensor, Future[None]]]] = deque()
        sending: deque[list[Future[None]]] = deque()
        # Both sides have posted their sends and receives of a round before they wait for an earlier one.
        while to_come or outgoing:
            if to_come:
                numel = to_come.popleft()
                rooms = {host: torch.empty(numel, dtype=sums.sent_dtype) for host in self.others}
                arriving.append({host: (room, self.receive(room, host)) for host, room in rooms.items()})
            leaving = {host: next(pieces, None) for host, pieces in outgoing.items()}
            sending.append([])
            for host, piece in leaving.items():
                if piece is not None:
                    sent[host].add(piece)
                    sending[-1].append(self.send(piece, host))
            outgoing = {host: pieces for host, pieces in outgoing.items() if leaving[host] is not None}
            if len(arriving) > ahead:
                self._add(next(own), arriving.popleft(), received)
            if len(sending) > ahead:
                self._wait_for(sending.popleft())
        for arrivals in arriving:
            self._add(next(own), arrivals, received)
        for transfers in sending:
            self._wait_for(transfers)
        for _ in own:  # nothing is left; what was changed last is written where it lies
            pass
        self.compare(sent, received)

    def compare(self, sent: Mapping[int, Tally], received: Mapping[int, Tally]) -> None:
        """Whether the gradients that came from each host are those it has sent. Collective; raises SelfTestError."""
        rooms = {host: torch.empty(1, dtype=torch.int64) for host in self.others}
        arriving = {host: self.receive(room, host) for host, room in rooms.items()}
        leaving = [self.send(sent[host].told(), host) for host in self.others]
        for host, arrives in arriving.items():
            self.wait(arrives)
            if not torch.equal(rooms[host], received[host].told()):
                raise not_as_sent(self.gradients_of(host))
        self._wait_for(leaving)

    def gradients_of(self, host: int) -> str:
        """For messages."""
        return f"gradients of rank {self._ranks[host]}"

    def close(self) -> None:
        """When all that was begun is over."""
        self._sending.close()
        self._receiving.close()

    @contextmanager
    def _reaching(self, host: int) -> Iterator[PeerLost]:
        """What is raised where gloo, which knows addresses and no ranks, does not reach the rank on `host`."""
        lost = PeerLost(
            f"rank {self._ranks[host]} has ended on another host, rank {self._ranks[self.own]} waits for it in vain"
        )
        try:
            yield lost
        except RuntimeError as error:
            raise lost from error

    def _next(self, messages: Counter[int], host: int) -> dist.ProcessGroup:
        """Both ends count alike: the n-th message from one to the other travels on the same connection for both."""
        messages[host] += 1
        group: dist.ProcessGroup = self._groups[messages[host] % len(self._groups)]
        return group

    def _add(
        self, own: Tensor, arrivals: Mapping[int, tuple[Tensor, Future[None]]], received: Mapping[int, Tally]
    ) -> None:
        for host, (room, arrives) in arrivals.items():
            self.wait(arrives)
            received[host].add(room)
        add_hosts(own, self.own, {host: room for host, (room, _) in arrivals.items()})

    def _wait_for(self, sent: Sequence[Future[None]]) -> None:
        for transfer in sent:
            self.wait(transfer)


def add_hosts(own: Tensor, own_host: int, received: dict[int, Tensor]) -> None:
    """`own`, of host `own_host`, becomes the sum over all hosts in their order; what was received may be bf16. Where
    `own` is bf16, too, it is rounded once."""
    if own.dtype == torch.bfloat16:
        total = own.float()
        add_hosts(total, own_host, received)
        own.copy_(total)
        return
    before = [received[host] for host in sorted(received) if host < own_host]
    if before:
        total = before[0].to(own.dtype)
        for values in before[1:]:
            total.add_(values)
        torch.add(total, own, out=own)
    for host in sorted(received):
        if host > own_host:
            own.add_(received[host])


def _bytes(tensor: Tensor) -> Tensor:
    """gloo sends bytes, whatever they mean."""
    return tensor.view(torch.uint8)
