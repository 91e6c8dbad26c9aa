"""FSDP2's all-gather and reduce-scatter among the ranks of one host through shared memory, by its own extension points.

gloo sends the same bytes through loopback, and its reduce-scatter is an all-reduce. Large collectives go in pieces.
The staging room has two halves, used in turn. Before a rank writes a half again it has met all others in the barrier of
the other half, which each of them enters only when it has read this one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.peers import Peers
from aliquot.distributed.collectives.reduce import add_sum
from aliquot.engines.fsdp.fsdp_memory import HALF_BYTES


class Stage:
    """Shared memory in which each rank has room of its own that all can read."""

    def __init__(self, peers: Peers) -> None:
        """Collective."""
        self.peers = peers
        self.staged_bytes = 0
        self._memories = peers.share(2 * HALF_BYTES)
        self._turn = 0
        self.busy_s = 0.0  # in collectives, since the stage was made, waiting left out

    def exchange(self, own: Tensor) -> list[Tensor]:
        """Flat `own` of every rank, in the order of ranks; good until the exchange after the next. Collective."""
        offset = self._turn * HALF_BYTES
        self._turn = 1 - self._turn
        views = [memory.tensor(offset, (own.numel(),), own.dtype) for memory in self._memories]
        views[self.peers.index].copy_(own)
        self.staged_bytes += own.nbytes
        self.peers.barrier()
        return views

    @contextmanager
    def timed(self) -> Iterator[None]:
        begun, waited_s = time.perf_counter(), self.peers.waited_s
        yield
        self.busy_s += time.perf_counter() - begun - (self.peers.waited_s - waited_s)


class _Fresh:
    """New memory for each collective, because FSDP keeps its output: parameters' gradients are views of it."""

    def allocate(self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)


class SharedAllGather(_Fresh):
    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        own, count = input_tensor.view(-1), input_tensor.numel()
        whole = output_tensor.view(-1)
        step = HALF_BYTES // own.element_size()
        with self._stage.timed():
            for start in range(0, count, step):
                piece = own[start : start + step]
                for rank, values in enumerate(self._stage.exchange(piece)):
                    whole[rank * count + start : rank * count + start + values.numel()].copy_(values)


class SharedReduceScatter(_Fresh):
    """Sums only, in the order of the ranks."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

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
        peers, own = self._stage.peers, output_tensor.view(-1)
        slices = input_tensor.view(peers.size, -1)
        step = HALF_BYTES // (peers.size * own.element_size())
        with self._stage.timed():
            for start in range(0, own.numel(), step):
                stop = min(start + step, own.numel())
                views = self._stage.exchange(slices[:, start:stop].reshape(-1))
                at = peers.index * (stop - start)
                add_sum(own[start:stop], [view[at : at + stop - start] for view in views], first=True)


_NUMEL = 1000  # of each rank


def check_collectives(device: torch.device, stage: Stage | None) -> None:
    """Known numbers are summed and gathered through `stage`; None: by torch's own collectives. Collective.

    Raises TrainingError. torch <= 2.8 on gloo summed where it should average (pytorch#162338).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(world_size, dtype=torch.float32, device=device).repeat_interleave(_NUMEL)
    own = torch.empty(_NUMEL, device=device)
    ranks_sum = world_size * (world_size + 1) / 2
    given = whole + rank + 1  # slice i, for rank i, holds i + rank + 1
    gathered = torch.empty_like(whole)
    if stage is None:
        dist.reduce_scatter_single(own, given)
        dist.all_gather_single(gathered, torch.full_like(own, rank))
    else:
        group = dist.group.WORLD
        assert group is not None
        SharedReduceScatter(stage)(output_tensor=own, input_tensor=given, group=group, op=dist.ReduceOp.SUM)
        SharedAllGather(stage)(output_tensor=gathered, input_tensor=torch.full_like(own, rank), group=group)
    _expect("reduce-scatter", own, torch.full_like(own, world_size * rank + ranks_sum))
    _expect("all-gather", gathered, whole)


def _expect(what: str, found: Tensor, expected: Tensor) -> None:
    wrong = (found != expected).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise SelfTestError(
            f"a {what} of known numbers gave {found[at].item()} instead of {expected[at].item()}:"
            " broken torch or memory?"
        )
