"""Group all ranks by host: ranks of the same host share memory; ranks of different hosts exchange messages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from aliquot.core.errors import LaunchError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import SharedMemory
from aliquot.distributed.collectives.wire import Wire


@dataclass(frozen=True)
class Hosts:
    """The hosts of a run, and this rank's connections within its host and to other hosts."""

    peers: Peers  # the ranks of this host
    table: tuple[tuple[int, ...], ...]  # global rank by [host][member]
    host: int  # this rank's host
    numa_nodes: tuple[int, ...]  # NUMA node of every member of `peers`
    wire: Wire | None  # to other hosts; None if the run has a single host

    @classmethod
    def join(cls, rank: int, numa_node: int, gather: Callable[[Any], list[Any]], identity: str | None = None) -> Self:
        """Connect all ranks. Collective. `gather` returns the JSON values of all ranks, by rank.

        Raises LaunchError if the hosts have unequal numbers of ranks, and PeerLost.
        """
        peers = Peers.join(rank, gather, identity)
        entries = gather([list(peers.ranks), numa_node])
        table = tuple(sorted({tuple(ranks) for ranks, _ in entries}))
        if len({len(ranks) for ranks in table}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in table)
            raise LaunchError(
                f"the host engine needs the same number of ranks on every host, but the hosts have {counts}: set the"
                " same launch.ranks on all nodes, or shard.engine: fsdp"
            )
        host = table.index(peers.ranks)
        wire = Wire([ranks[peers.index] for ranks in table], host, peers.size) if len(table) > 1 else None
        return cls(peers, table, host, tuple(entries[member][1] for member in peers.ranks), wire)

    @property
    def counterparts(self) -> list[int]:
        """The ranks that exchange the same shards, one per host, including this rank."""
        return [ranks[self.peers.index] for ranks in self.table]

    @property
    def transport(self) -> str:
        """A description of the transports between ranks, for the console."""
        names = ["shared memory"] if self.peers.size > 1 else []
        if self.wire is not None:
            names.append("gloo between hosts")
        return ", ".join(names) or "one rank"

    def name_lost_host(self) -> AbstractContextManager[None]:
        """Wrap a collective over all ranks: if it fails because a host has ended, raise PeerLost with the rank."""
        return nullcontext() if self.wire is None else self.wire.name_lost_host()

    def share_per_numa_node(self, size_bytes: int, touch: bool = True) -> tuple[SharedMemory, list[SharedMemory]]:
        """Create zeroed memory that all ranks of a NUMA node share. Collective.

        With `touch` and several NUMA nodes, the ranks of a node touch all pages of its memory now. The kernel then
        places the pages on that node. Returns the memory of this rank's node, and the memories of the other nodes.
        """
        creators = {node: self.numa_nodes.index(node) for node in self.numa_nodes}  # the first rank of every NUMA node
        local_node = self.numa_nodes[self.peers.index]
        memories = self.peers.share(size_bytes if creators[local_node] == self.peers.index else 0)
        local = memories[creators[local_node]]
        remote = [memories[index] for node, index in sorted(creators.items()) if node != local_node]
        if remote and touch:  # the kernel places a page on the node that touches it first
            members = [index for index, node in enumerate(self.numa_nodes) if node == local_node]
            share = -(-size_bytes // len(members))
            start = members.index(self.peers.index) * share
            local.tensor(start, (max(0, min(share, size_bytes - start)),), torch.uint8).zero_()
            self.peers.barrier()  # all pages are placed before any rank writes weights
        return local, remote
