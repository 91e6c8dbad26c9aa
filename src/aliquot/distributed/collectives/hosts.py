"""Where all ranks are: those of this host, connected through shared memory, and their counterparts on other hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch

from aliquot.core.errors import LaunchError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.shared_memory import Memory
from aliquot.distributed.collectives.wire import Wire


@dataclass(frozen=True)
class Hosts:
    peers: Peers  # the ranks of this host
    table: tuple[tuple[int, ...], ...]  # [host][index on it]: the global rank
    own: int  # this rank's host
    numa: tuple[int, ...]  # NUMA node of each member of `peers`
    wire: Wire | None  # None: there is one host only

    @classmethod
    def join(cls, rank: int, numa_node: int, gather: Callable[[Any], list[Any]], identity: str | None = None) -> Self:
        """Collective over all ranks; `gather` returns every rank's JSON value, by rank.

        Raises UserError if the hosts have unequal numbers of ranks, PeerLost if a rank of this host does not come.
        """
        peers = Peers.join(rank, gather, identity)
        told = gather([list(peers.ranks), numa_node])
        table = tuple(sorted({tuple(ranks) for ranks, _ in told}))
        if len({len(ranks) for ranks in table}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in table)
            raise LaunchError(
                f"the host engine needs equally many ranks on every host, and there are {counts}: give all nodes the"
                " same launch.ranks, or set shard.engine: fsdp"
            )
        own = table.index(peers.ranks)
        wire = Wire([ranks[peers.index] for ranks in table], own, peers.size) if len(table) > 1 else None
        return cls(peers, table, own, tuple(told[member][1] for member in peers.ranks), wire)

    @property
    def counterparts(self) -> list[int]:
        """The rank on each host that this one exchanges with; on its own host itself."""
        return [ranks[self.peers.index] for ranks in self.table]

    @property
    def transport(self) -> str:
        """What ranks talk through, for people."""
        found = ["shared memory"] if self.peers.size > 1 else []
        if self.wire is not None:
            found.append("gloo between hosts")
        return ", ".join(found) or "one rank"

    def naming(self) -> AbstractContextManager[None]:
        """Around what is collective over all ranks: where it fails because a host has ended, raises PeerLost."""
        return nullcontext() if self.wire is None else self.wire.naming()

    def share_per_numa_node(self, size_bytes: int, touch: bool = True) -> tuple[Memory, list[Memory]]:
        """Zeroed memory that all ranks of a NUMA node share: this rank's, and those of the other nodes. Collective.

        `touch`: all of it is wanted, and where there are several nodes its pages are placed now.
        """
        keeper = {node: self.numa.index(node) for node in self.numa}  # the first rank of a node makes its memory
        own_node = self.numa[self.peers.index]
        memories = self.peers.share(size_bytes if keeper[own_node] == self.peers.index else 0)
        own = memories[keeper[own_node]]
        others = [memories[index] for node, index in sorted(keeper.items()) if node != own_node]
        if others and touch:
            self._touch(own)
        return own, others

    def _touch(self, memory: Memory) -> None:
        """Pages lie where they are touched first: each rank of the node touches its share."""
        node = [index for index, numa in enumerate(self.numa) if numa == self.numa[self.peers.index]]
        share = -(-memory.size_bytes // len(node))
        start = node.index(self.peers.index) * share
        count = min(share, memory.size_bytes - start)
        if count > 0:
            memory.tensor(start, (count,), torch.uint8).zero_()
        self.peers.barrier()  # nobody writes weights before
