"""The ranks of a run as one group: joining and leaving it, its cores and memory."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

# Its functions have the default group as it is at import as a default argument. Imported later, by a model's code, they
# would hold the group for good: destroying it would then not end gloo's threads (see `Ranks.close`).
import torch.distributed.nn
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, but not re-exported

from aliquot.distributed.collectives import json_values
from aliquot.distributed.collectives.json_values import JSON
from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.gloo_interface import address_of, check_interface, choose_interface, gloo_interface
from aliquot.distributed.numa_binding import bind_memory, pin, prefer_node
from aliquot.distributed.rendezvous import meet_ranks
from aliquot.distributed.signed_store import SignedStore
from aliquot.distributed.topology import Topology, check_gpus
from aliquot.machine.allocator import tune_glibc


class Ranks:
    """This rank's membership in the default process group. Every method is a collective: all ranks call it."""

    def __init__(
        self,
        topology: Topology,
        allowed_cores: frozenset[int],
        memory_bound: bool = False,
        store: Store | None = None,
    ) -> None:
        self.topology = topology
        self.store = store  # in which several have met; kept here for the process groups, too
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.memory_bound = memory_bound  # to the NUMA node of this rank's cores
        self.allowed_cores = allowed_cores  # before pinning: for helper processes that should use the whole machine

    @classmethod
    def join(cls, topology: Topology, timeout_s: float, join_timeout_s: float = 900.0) -> Self:
        """Pin this process and its memory, size its thread pool, join the group; a world of one needs no environment.

        A collective that waits longer than `timeout_s` for a peer fails. Raises UserError, naming it, if another rank
        has not come `join_timeout_s` from now.
        """
        tune_glibc()
        allowed_cores = frozenset(os.sched_getaffinity(0))
        memory_bound = False
        if topology.cores:
            pin(topology.cores)
            memory_bound = bind_memory(topology.cores)
        torch.set_num_threads(topology.threads)
        backend = "gloo"
        if topology.device == "cuda":
            check_gpus(topology.local_world_size)
            torch.cuda.set_device(topology.local_rank)
            backend = "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        store = None
        if topology.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            choose_interface(topology)
            check_interface()
            store = meet_ranks(topology, os.environ, join_timeout_s)
            # nccl's own threads read its store until after the interpreter has ended: Python cannot answer them.
            bare = store.unsigned() if isinstance(store, SignedStore) and topology.device == "cuda" else store
            dist.init_process_group(
                backend, store=bare, rank=topology.rank, world_size=topology.world_size, timeout=timeout
            )
        return cls(topology, allowed_cores, memory_bound, store)

    def barrier(self) -> None:
        # A gather, because nccl's barrier would occupy the GPU and this one has a CPU tensor whatever the device.
        self.gather(None)

    def gather(self, value: JSON) -> list[JSON]:
        """The values of all ranks, by rank, on every rank."""
        return json_values.gather(value)

    def broadcast(self, value: JSON) -> JSON:
        """Rank 0's value on every rank; what the others pass is not looked at."""
        return json_values.broadcast(value)

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """For work that one rank does while the others wait: it and the processes it starts may use all cores."""
        pin(tuple(self.allowed_cores))
        if self.memory_bound:
            prefer_node(None)
        try:
            yield
        finally:
            if self.topology.cores:
                pin(self.topology.cores)
            if self.memory_bound:
                bind_memory(self.topology.cores)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close at the end; after an error only where there are no peers, who must hear of it before they see the
        connection go."""
        try:
            yield
        except BaseException:
            if self.world_size == 1:
                self.close()
            raise
        self.close()

    def close(self) -> None:
        """Leave the group. Whatever was sharded over it must be out of use."""
        # gloo's threads drop their last tensors after the collective has returned. If the interpreter ends first the
        # process aborts; destroying the group joins them, once nothing holds it any more: no engine in a reference
        # cycle, no default argument. (Specs that torch caches for DTensors keep it for fsdp, DeepSpeed's modules for
        # theirs; then the collection is the time in which gloo's threads come to rest.)
        gc.collect()
        dist.destroy_process_group()


def group_lines(ranks: Ranks, transport: str) -> list[str]:
    """A line for the group of all ranks, one for the engine's `transport`; none for a rank alone. Collective.

    What is reported has come through the very group, which proves that it is connected.
    """
    interface = gloo_interface()
    own = [platform.node(), interface or "default interface", address_of(interface)]
    told = ranks.gather([host_identity(), " ".join(own), ranks.memory_bound])
    if ranks.world_size == 1:
        return []
    hosts: dict[str, list[int]] = {}
    for rank, (identity, _, _) in enumerate(told):
        hosts.setdefault(identity, []).append(rank)
    groups = list(hosts.values())
    where = " | ".join(f"{_span(members)} on {told[members[0]][1]}" for members in groups)
    bound = [rank for rank, (_, _, is_bound) in enumerate(told) if is_bound]
    return [
        f"{ranks.world_size} ranks connected by gloo over TCP: {where}",
        f"weights and gradients: {transport}" + (f"; memory of the own NUMA node on {_span(bound)}" if bound else ""),
    ]


def _span(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    whole = ranks == list(range(ranks[0], ranks[-1] + 1))
    return f"ranks {ranks[0]}-{ranks[-1]}" if whole else f"ranks {', '.join(map(str, ranks))}"
