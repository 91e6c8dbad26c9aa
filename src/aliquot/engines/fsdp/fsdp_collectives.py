"""Collectives of the fsdp engine: FSDP2's all-gather and reduce-scatter through shared memory, and a self-test.

gloo would send the same bytes through the loopback interface, and its reduce-scatter is an all-reduce. Collectives that
are larger than the staging buffer run in several pieces. The buffer has two halves, which the pieces use alternately.
A rank overwrites a half only after the barrier for the other half, which no rank enters before it has read the first
half.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from aliquot.core.errors import EngineError
from aliquot.distributed.collectives.peers import Peers, host_identity
from aliquot.distributed.collectives.reduce import add_sum, check_result
from aliquot.distributed.ranks import gather
from aliquot.distributed.topology import Topology
from aliquot.engines.base import EngineSpec
from aliquot.engines.fsdp.fsdp_memory import HALF_BYTES
from aliquot.engines.fsdp.fsdp_shards import Division

_CHECK_NUMEL = 1000  # elements per rank in the self-test


class StagingBuffer:
    """Shared memory of the ranks of a host: each rank writes to its own part, and reads the parts of all ranks."""

    def __init__(self, peers: Peers) -> None:
        """Share the memory. Collective."""
        self.peers = peers
        self.staged_bytes = 0
        self._memories = peers.share(2 * HALF_BYTES)
        self._half = 0
        self.busy_s = 0.0  # in collectives, without waiting

    def exchange(self, values: Tensor) -> list[Tensor]:
        """Return the flat `values` of every rank, in rank order. Read them before the next exchange. Collective."""
        offset = self._half * HALF_BYTES
        self._half = 1 - self._half
        views = [memory.tensor(offset, (values.numel(),), values.dtype) for memory in self._memories]
        views[self.peers.index].copy_(values)
        self.staged_bytes += values.nbytes
        self.peers.barrier()
        return views

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Add the time of the block to `busy_s`."""
        begun, waited_s = time.perf_counter(), self.peers.waited_s
        yield
        self.busy_s += time.perf_counter() - begun - (self.peers.waited_s - waited_s)


class _NewOutput:
    """Allocate a new output for each collective, because parameters' gradients are views of the output."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class SharedAllGather(_NewOutput):
    """An all-gather through shared memory, for FSDP2's `set_custom_all_gather`."""

    def __init__(self, staging: StagingBuffer) -> None:
        self._staging = staging

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        local, count = input_tensor.view(-1), input_tensor.numel()
        whole = output_tensor.view(-1)
        step = HALF_BYTES // local.element_size()
        with self._staging.timed():
            for start in range(0, count, step):
                piece = local[start : start + step]
                for rank, values in enumerate(self._staging.exchange(piece)):
                    whole[rank * count + start : rank * count + start + values.numel()].copy_(values)


class SharedReduceScatter(_NewOutput):
    """A reduce-scatter through shared memory, for FSDP2's `set_custom_reduce_scatter`. It sums in rank order."""

    def __init__(self, staging: StagingBuffer) -> None:
        self._staging = staging

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"{op}: sums only")
        peers, local = self._staging.peers, output_tensor.view(-1)
        slices = input_tensor.view(peers.size, -1)
        step = HALF_BYTES // (peers.size * local.element_size())
        with self._staging.timed():
            for start in range(0, local.numel(), step):
                stop = min(start + step, local.numel())
                views = self._staging.exchange(slices[:, start:stop].reshape(-1))
                at = peers.index * (stop - start)
                add_sum(local[start:stop], [view[at : at + stop - start] for view in views], first=True)


class RoundedReduceScatter(_NewOutput):
    """A reduce-scatter of fp32 gradients that sends and adds bf16, for FSDP2's `set_custom_reduce_scatter`.

    With bf16 as FSDP2's own reduce_dtype, gradients of several micro-batches would be summed in bf16, too.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        reduced = torch.empty_like(output_tensor, dtype=torch.bfloat16)
        dist.reduce_scatter_single(reduced, input_tensor.bfloat16(), op=op, group=group)
        output_tensor.copy_(reduced)


def use_shared_memory(
    groups: Sequence[FSDPModule], spec: EngineSpec, topology: Topology, division: Division
) -> StagingBuffer | None:
    """Let CPU ranks of one host exchange weights and gradients through shared memory; None: gloo or nccl is used.

    With replicas, the ranks of each node do so.

    Raises EngineError if `spec` requires shared memory, but the ranks cannot share memory.
    """
    if spec.collectives == "gloo" or division.shards == 1:
        return None
    condition = "shard.collectives: shared_memory is for CPU ranks of one host with engine fsdp"
    if topology.device != "cpu":
        if spec.collectives == "shared_memory":
            raise EngineError(f"{condition}, and launch.device is {topology.device}: use auto")
        return None
    peers = Peers.join(topology.rank, gather, f"{host_identity()} {division.replica}")
    hosts = len({tuple(ranks) for ranks in gather(list(peers.ranks))})
    if hosts > division.replicas:
        peers.close()
        if spec.collectives == "shared_memory":
            raise EngineError(f"{condition}, and there are {hosts} hosts: use auto or gloo, or engine host")
        return None
    staging = StagingBuffer(peers)
    for group in groups:
        # torch annotates the arguments with private classes, but calls them with keyword arguments only.
        group.set_custom_all_gather(SharedAllGather(staging))  # type: ignore[arg-type]
        group.set_custom_reduce_scatter(SharedReduceScatter(staging))  # type: ignore[arg-type]
    return staging


def check_collectives(device: torch.device, staging: StagingBuffer | None, division: Division) -> None:
    """Test reduce-scatter and all-gather on known numbers, by `staging` or, if None, by torch. Collective.

    With several replicas, test also their all-reduce. Raises SelfTestError if a result is wrong. For example, torch
    <= 2.8 with gloo returned sums instead of averages (pytorch#162338).
    """
    rank, size, group = division.shard, division.shards, division.shard_group
    whole = torch.arange(size, dtype=torch.float32, device=device).repeat_interleave(_CHECK_NUMEL)
    reduced = torch.empty(_CHECK_NUMEL, device=device)
    addends = whole + rank + 1  # slice i goes to rank i and has the value i + rank + 1
    gathered = torch.empty_like(whole)
    if staging is None:
        dist.reduce_scatter_single(reduced, addends, group=group)
        dist.all_gather_single(gathered, torch.full_like(reduced, rank), group=group)
    else:
        SharedReduceScatter(staging)(output_tensor=reduced, input_tensor=addends, group=group, op=dist.ReduceOp.SUM)
        SharedAllGather(staging)(output_tensor=gathered, input_tensor=torch.full_like(reduced, rank), group=group)
    check_result("reduce-scatter", reduced, torch.full_like(reduced, size * rank + _sum_to(size)))
    check_result("all-gather", gathered, whole)
    if division.replicas > 1:
        summed = torch.full_like(reduced, division.replica + 1)
        dist.all_reduce(summed, group=division.replica_group)
        check_result("all-reduce", summed, torch.full_like(summed, _sum_to(division.replicas)))


def _sum_to(count: int) -> float:
    return count * (count + 1) / 2
