"""Ranks that use the collectives in one way each; see test_collectives.py."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.peers import PeerLost, Peers
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.distributed.collectives.ring import Piece, Ring
from aliquot.distributed.ranks import Members, gather
from aliquot.engines.host.gradient_sums import reduce_scatter
from tests.processes import as_ranks


def values(seed: int, rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    return torch.randn(numel, generator=generator).to(dtype)


def sums(peers: Peers, seed: int, delays: bool = True) -> None:
    """Random pieces through a small ring with random delays, against the plain sum in the order of the ranks."""
    draw = random.Random(seed)  # the same program on every rank
    own_draw = random.Random(seed * 7 + peers.index)
    ring = Ring(peers, 1 << 16)
    checked = []
    for number in range(120):
        dtype = draw.choice([torch.bfloat16, torch.float32])
        numel = draw.choice([0, 1, 3, draw.randrange(1, 2000), draw.randrange(1, (1 << 16) // 4 + 1)])
        low = draw.randrange(numel + 1)
        high = draw.randrange(low, numel + 1)

        def check(
            piece: Piece, number: int = number, numel: int = numel, low: int = low, high: int = high, dtype=dtype
        ):  # type: ignore[no-untyped-def]
            views = [ring.view(piece, rank, dtype, low, (high - low,)) for rank in range(peers.size)]
            out = torch.full((high - low,), 2.0)
            add_sum(out, views, first=number % 2 == 0)
            parts = [values(seed * 1000 + number, rank, numel, dtype).float()[low:high] for rank in range(peers.size)]
            expected = reduce(torch.add, parts)
            assert torch.equal(out, expected if number % 2 == 0 else expected + 2.0)
            checked.append(number)

        piece = ring.stage(numel * dtype.itemsize)
        space = ring.view(piece, peers.index, dtype, 0, (numel,))
        space.copy_(values(seed * 1000 + number, peers.index, numel, dtype))
        if delays and own_draw.random() < 0.1:
            time.sleep(own_draw.random() * 0.02)
        ring.publish(piece, check)
        if draw.random() < 0.05:
            ring.drain()
    ring.drain()
    assert checked == list(range(120))


def killed(peers: Peers, folder: Path) -> None:
    """The last rank dies without a word inside a reduction; the others learn of it at once."""
    ring = Ring(peers, 1 << 16)
    victim = peers.size - 1
    start = time.monotonic()
    try:
        for number in range(100_000):
            if peers.index == victim and number == 57:
                os.kill(os.getpid(), signal.SIGKILL)
            piece = ring.stage(1000)
            ring.publish(piece, lambda _: None)
        raise AssertionError("nobody noticed")
    except PeerLost as lost:
        assert time.monotonic() - start < 10
        (folder / f"lost-{peers.index}").write_text(str(lost))
    os._exit(0)  # the process group would wait for the dead rank


def exchanged(rank: int, world_size: int) -> None:
    """Values of any length, also with newlines, and arrays, of all ranks."""
    values = [{"rank": each, "text": "two\nlines" * 100 * (each % 3)} for each in range(world_size)]
    assert gather(values[rank]) == values
    assert gather(None) == [None] * world_size
    members, bits = Members(torch.device("cpu")), np.array([1 << rank, 3, -1])
    assert members.combine(bits, "xor").tolist() == [(1 << world_size) - 1, 3 * (world_size % 2), -(world_size % 2)]
    assert members.combine(bits, "sum").tolist() == [(1 << world_size) - 1, 3 * world_size, -world_size]


def of_length(rank: int, number: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + number)
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=generator)


class SumsInMemory:
    """Sums for every host, as tensors in memory, which `reduce_scatter` takes for windows on disk."""

    sent_dtype = torch.float32

    def __init__(self, tensors: list[list[torch.Tensor]]) -> None:
        self.tensors = tensors

    def pieces(self, host: int) -> list[int]:
        return [piece.numel() for piece in self.visit(host, changes=False)]

    def visit(self, host: int, changes: bool) -> Iterator[torch.Tensor]:
        for tensor in self.tensors[host]:
            yield from torch.split(tensor, 4 << 20) if tensor.numel() else ()


def hosts(rank: int, world_size: int) -> None:
    """Ranks told that they are on several hosts: the wire's reduce-scatter, of uneven and empty parts, and messages."""
    for per_host in [n for n in (1, 2) if world_size % n == 0 and world_size > n]:
        found = Hosts.join(rank, 0, gather, identity=f"host-{rank // per_host}")
        assert (
            found.table == tuple(tuple(range(first, first + per_host)) for first in range(0, world_size, per_host))
            and found.wire is not None
        )
        lengths = [[5, 0, 3, 7_000_000][: 2 + host % 3] for host in range(len(found.table))]

        def of(sender: int, host: int) -> list[torch.Tensor]:
            return [values(sender * 10 + host, i, n, torch.float32) for i, n in enumerate(lengths[host])]  # noqa: B023

        gradients = [of(rank, host) for host in range(len(found.table))]
        reduce_scatter(found.wire, SumsInMemory(gradients), ahead=2)
        counterparts = [ranks[found.peers.index] for ranks in found.table]
        for index, summed in enumerate(gradients[found.host]):
            parts = [of(sender, found.host)[index] for sender in counterparts]
            expected = reduce(torch.add, parts)
            assert torch.equal(summed, expected)
        sent = sum(4 * n for host, own in enumerate(lengths) for n in own if host != found.host)
        assert found.wire.sent_bytes == sent + 8 * (len(found.table) - 1)  # and a checksum for each other host

        # Messages shorter than the room for them, on several connections, arrive as they were sent.
        draw = random.Random(7)
        lengths = [draw.choice([1, 8, 5000, 300_000]) for _ in range(20)]
        sent = [found.wire.send(of_length(rank, i, n), h) for i, n in enumerate(lengths) for h in found.wire.peer_hosts]
        rooms = [[torch.zeros(300_008, dtype=torch.uint8) for _ in lengths] for _ in found.wire.peer_hosts]
        arrivals = [
            [found.wire.receive(room, h) for room in row] for h, row in zip(found.wire.peer_hosts, rooms, strict=True)
        ]
        for h, row, arriving in zip(found.wire.peer_hosts, rooms, arrivals, strict=True):
            for i, (room, arrival) in enumerate(zip(row, arriving, strict=True)):
                arrival.result()
                assert torch.equal(room[: lengths[i]], of_length(counterparts[h], i, lengths[i]))
                assert not room[lengths[i] :].any()
        for transfer in sent:
            transfer.result()
        found.wire.close()
        found.peers.close()


def killed_host(rank: int, world_size: int, folder: Path) -> None:
    """The last of several hosts, of one rank each, dies between messages; the others name its rank."""
    wire = Hosts.join(rank, 0, gather, identity=f"host-{rank}").wire
    assert wire is not None
    room = torch.empty(1 << 20, dtype=torch.uint8)
    try:
        for number in range(100_000):
            if rank == world_size - 1 and number == 7:
                os.kill(os.getpid(), signal.SIGKILL)
            last = 0 if rank else world_size - 1
            arrival, leaving = wire.receive(room, last), wire.send(torch.zeros(1 << 20, dtype=torch.uint8), last)
            wire.wait(arrival)
            wire.wait(leaving)
    except PeerLost as lost:
        (folder / f"lost-{rank}").write_text(str(lost))
    os._exit(0)


def numa(rank: int) -> None:
    """One memory for each NUMA node, seen by all."""
    found = Hosts.join(rank, rank % 2, gather)
    own, others = found.share_per_numa_node(4096)
    assert len(others) == min(found.peers.size, 2) - 1
    for number, memory in enumerate([own, *others]):
        node = (rank + number) % 2
        memory.tensor(64 * rank, (1,), torch.int64).fill_(100 * node + rank)
    found.peers.barrier()
    for number, memory in enumerate([own, *others]):
        node = (rank + number) % 2
        seen = [int(memory.tensor(64 * r, (1,), torch.int64)) for r in range(found.peers.size)]
        assert seen == [100 * node + r for r in range(found.peers.size)]
    found.peers.barrier()


def barrier(peers: Peers, folder: Path) -> None:
    """Each rank arrives 0.1 s after the rank before it, and nobody leaves before the last one has arrived."""
    time.sleep(0.1 * peers.index)
    (folder / f"arrived-{peers.index}").touch()
    peers.barrier()
    assert len(list(folder.glob("arrived-*"))) == peers.size


def work(rank: int, world_size: int, folder: Path, arguments: list[str]) -> None:
    if rank % 2:
        time.sleep(0.1)  # late ranks
    match arguments:
        case ["hosts"]:
            hosts(rank, world_size)
        case ["killed_host"]:
            killed_host(rank, world_size, folder)
        case ["numa"]:
            numa(rank)
        case [what]:
            on_one_host(rank, world_size, folder, what)


def on_one_host(rank: int, world_size: int, folder: Path, what: str) -> None:
    peers = Peers.join(rank, gather)
    assert (peers.size, peers.index) == (world_size, rank)
    if what == "killed":
        killed(peers, folder)
    exchanged(rank, world_size)
    barrier(peers, folder)
    for seed in range(3):
        sums(peers, seed)
    dist.barrier()
    assert not [name for name in os.listdir("/dev/shm") if "aliquot" in name]  # noqa: PTH208
    peers.close()


if __name__ == "__main__":
    as_ranks(work)
