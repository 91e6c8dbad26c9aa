"""The group of all ranks of a run: join it, exchange small values, leave it."""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

# Import torch.distributed.nn before the default group exists, because its functions bind that group at import, as a
# default argument. A later import by a model's code would keep the group alive, and destroying the group would not end
# gloo's threads (see `Ranks.close`).
import torch.distributed.nn
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, but not re-exported

from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.collectives.wire import connect_groups
from aliquot.distributed.flight_recorder import limit_nccl
from aliquot.distributed.gloo_interface import address_of, check_network, choose_interface, gloo_interface
from aliquot.distributed.numa_binding import bind_memory, pin_process, set_preferred_node
from aliquot.distributed.rendezvous import meet_ranks
from aliquot.distributed.signed_store import SignedStore
from aliquot.distributed.store_server import allow_open_files
from aliquot.distributed.topology import Topology, check_locked_memory, choose_gpu
from aliquot.machine.allocator import tune_glibc, use_expandable_segments
from aliquot.machine.cpu import format_cpu_list

# Any value that json writes and reads back unchanged.
JSON = Any
_CPU = torch.device("cpu")
_NEWLINE = torch.tensor([10], dtype=torch.uint8)  # json.dumps writes none
_LAZY = "TORCH_GLOO_LAZY_INIT"  # read by torch whenever it creates a group of gloo


class Members:
    """The ranks of the default process group, with any backend. Every method is collective: all ranks call it."""

    _device = _CPU

    def __init__(self, device: torch.device) -> None:
        """The ranks exchange values in tensors on `device`."""
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device

    def gather(self, value: JSON) -> list[JSON]:
        """Return the JSON values of all ranks, by rank, on every rank."""
        return gather(value, self._device)

    def combine(self, values: npt.NDArray[np.int64], operation: Literal["sum", "xor"]) -> npt.NDArray[np.int64]:
        """Return the element-wise sum or exclusive-or of the arrays of all ranks."""
        total = torch.from_numpy(values.copy())
        dist.all_reduce(total, {"sum": dist.ReduceOp.SUM, "xor": dist.ReduceOp.BXOR}[operation])
        return total.numpy()


class Ranks(Members):
    """This rank's membership in the default process group of a run."""

    def __init__(
        self,
        topology: Topology,
        allowed_cores: frozenset[int],
        memory_bound: bool = False,
        store: Store | None = None,
    ) -> None:
        self.topology = topology
        self.store = store  # of the rendezvous; torch's process groups need it to stay alive
        self.rank = topology.rank
        self.world_size = topology.world_size
        self.memory_bound = memory_bound  # whether memory is bound to the NUMA node of this rank's cores
        self.allowed_cores = allowed_cores  # before pinning, for helper processes that may use the whole machine
        self._excepthook = sys.excepthook

    @classmethod
    def join(
        cls, topology: Topology, timeout_s: float, join_timeout_s: float = 900.0, nccl_timeout_s: float = 1800.0
    ) -> Self:
        """Pin this process and its memory, size its thread pool and join the group.

        A collective that waits for a peer longer than `timeout_s`, or with NCCL `nccl_timeout_s`, fails. If ranks do
        not join within `join_timeout_s`, a UserError names the missing ranks.
        """
        tune_glibc()
        excepthook = sys.excepthook  # torch puts the number of the rank before tracebacks
        allowed_cores = frozenset(os.sched_getaffinity(0))
        memory_bound = False
        if topology.cores:
            pin_process(topology.cores)
            memory_bound = bind_memory(topology.cores)
        torch.set_num_threads(topology.threads)
        backend = "gloo"
        if topology.device == "cuda":
            use_expandable_segments()
            if topology.nodes > 1 and os.environ.get("NCCL_NET", "").lower() != "socket":
                check_locked_memory()
            torch.cuda.set_device(choose_gpu(topology.local_rank, topology.local_world_size))
            backend = "cpu:gloo,cuda:nccl"
        timeout = timedelta(seconds=timeout_s)
        store = None
        check_network()
        if topology.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)
        else:
            choose_interface(topology)
            allow_open_files()
            store = meet_ranks(topology, os.environ, join_timeout_s)
            # NCCL's threads read the store even after the interpreter has ended, when a SignedStore, which is Python
            # code, can no longer answer.
            bare = store
            if topology.device == "cuda":
                bare = store.unsigned() if isinstance(store, SignedStore) else store
                # A rank that compiles its kernels lets the others wait for NCCL's id.
                bare.set_timeout(timedelta(seconds=nccl_timeout_s))
            with _connecting_lazily():
                dist.init_process_group(
                    backend, store=bare, rank=topology.rank, world_size=topology.world_size, timeout=timeout
                )
        if topology.device == "cuda":
            limit_nccl(nccl_timeout_s)
        ranks = cls(topology, allowed_cores, memory_bound, store)
        ranks._excepthook = excepthook
        return ranks

    def barrier(self) -> None:
        # Gather CPU tensors, because a barrier of NCCL would occupy the GPU.
        self.gather(None)

    def broadcast(self, value: JSON) -> JSON:
        """Return rank 0's JSON value on every rank; the arguments of other ranks are ignored."""
        return self.gather(value if self.rank == 0 else None)[0]

    def broadcast_into(self, values: Tensor) -> None:
        """Copy rank 0's `values`, a CPU tensor, into `values` of every rank."""
        dist.broadcast(values, 0)

    @contextmanager
    def unpinned(self) -> Iterator[None]:
        """Let this rank and the processes that it starts use all cores, while the other ranks wait."""
        pin_process(tuple(self.allowed_cores))
        if self.memory_bound:
            set_preferred_node(None)
        try:
            yield
        finally:
            if self.topology.cores:
                pin_process(self.topology.cores)
            if self.memory_bound:
                bind_memory(self.topology.cores)

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the group at the end of the block.

        After an error, close the group only if it has one rank: peers must read the error before they lose the
        connection.
        """
        try:
            yield
        except BaseException:
            if self.world_size == 1:
                self.close()
            raise
        self.close()

    def close(self) -> None:
        """Leave the group. No sharded tensor may be in use any more."""
        # gloo's threads free their last tensors after a collective has returned. If the interpreter ends first, the
        # process aborts. Destroying the group joins the threads, but only without remaining references to the group,
        # for example in an engine's reference cycle or in a default argument. (torch's cached DTensor specs and
        # DeepSpeed's modules keep references; the garbage collection then gives gloo's threads the time to finish.)
        connect_groups.cache_clear()
        gc.collect()
        dist.destroy_process_group()
        sys.excepthook = self._excepthook


@contextmanager
def _connecting_lazily() -> Iterator[None]:
    """Let gloo connect two ranks of a new group at their first exchange, because most pairs have none."""
    before = os.environ.get(_LAZY)
    os.environ[_LAZY] = before or "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LAZY]


def gather(value: JSON, device: torch.device = _CPU) -> list[JSON]:
    """Return the JSON values of all ranks, by rank, on every rank; exchange them in tensors on `device`. Collective."""
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    if device.type == "cpu":
        return [json.loads(line) for line in _gather_lines(text).numpy().tobytes().split(b"\n")]
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([text.numel()], device=device))
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: text.numel()] = text
    texts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [
        json.loads(received[: int(size)].cpu().numpy().tobytes()) for received, size in zip(texts, sizes, strict=True)
    ]


def _gather_lines(text: Tensor) -> Tensor:
    """Return the texts of all ranks, uint8 [bytes], separated by newlines, by rank.

    Texts are collected in a binomial tree and broadcast. A ring, as in all_gather of gloo, would take as many messages
    of every rank as there are ranks, and would pad all texts to the longest.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distance = 1
    while distance < world_size and not rank & distance:
        if rank + distance < world_size:
            text = torch.cat([text, _NEWLINE, _receive_text(rank + distance)])
        distance *= 2
    if rank:
        dist.send(torch.tensor([text.numel()]), rank - distance)
        dist.send(text, rank - distance)
    size = torch.tensor([text.numel()])
    dist.broadcast(size, 0)
    lines = text if rank == 0 else torch.empty(int(size), dtype=torch.uint8)
    dist.broadcast(lines, 0)
    return lines


def _receive_text(source: int) -> Tensor:
    size = torch.empty(1, dtype=torch.int64)
    dist.recv(size, source)
    text = torch.empty(int(size), dtype=torch.uint8)
    dist.recv(text, source)
    return text


def group_lines(ranks: Ranks, transport: str) -> list[str]:
    """Describe the group of all ranks and the engine's `transport`; no lines for a single rank. Collective.

    The ranks exchange these facts through the group itself, which proves that all ranks are connected.
    """
    interface = gloo_interface()
    place = [platform.node(), interface or "default interface", address_of(interface)]
    entries = ranks.gather([host_identity(), " ".join(place), ranks.memory_bound])
    if ranks.world_size == 1:
        return []
    hosts: dict[str, list[int]] = {}
    for rank, (identity, _, _) in enumerate(entries):
        hosts.setdefault(identity, []).append(rank)
    groups = list(hosts.values())
    where = " | ".join(f"{_span(members)} on {entries[members[0]][1]}" for members in groups)
    bound = [rank for rank, (_, _, is_bound) in enumerate(entries) if is_bound]
    return [
        f"{ranks.world_size} ranks connected by gloo over TCP: {where}",
        f"weights and gradients: {transport}" + (f"; memory of the own NUMA node on {_span(bound)}" if bound else ""),
    ]


def _span(ranks: list[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {format_cpu_list(ranks)}"
