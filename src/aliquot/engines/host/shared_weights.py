"""The model's weights in shared memory: one copy per NUMA node, from which all ranks of the node compute.

Every module of this package names a weight by its index in the engine's list of `Weight`s. Each rank owns a range of
each weight: it alone updates the range, in the copies of all NUMA nodes of its host.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from aliquot.core.errors import SelfTestError
from aliquot.distributed.collectives.buffer_sizes import align
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.json_values import gather
from aliquot.distributed.collectives.shared_memory import SharedMemory
from aliquot.models.structure import replace_tensors, tied_weights
from aliquot.optim.adamw import decays


@dataclass(frozen=True)
class Weight:
    """One weight of the model, and the range of it that each rank owns."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # [rank]: flat
    trainable: bool
    dtype: torch.dtype  # in which forward and backward passes use the weight

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    def shard_numel(self, rank: int) -> int:
        """Return how many elements `rank` owns."""
        start, stop = self.ranges[rank]
        return stop - start

    def trainable_numel(self, rank: int) -> int:
        """Return how many elements `rank` owns gradients and optimizer state of."""
        return self.shard_numel(rank) if self.trainable else 0


@dataclass(frozen=True)
class Counterparts:
    """The ranks that gradient sums and updated weights travel between: one on each host, this rank among them."""

    ranks: Sequence[int]  # [host]
    host: int  # of this rank

    @property
    def rank(self) -> int:
        """This rank."""
        return self.ranks[self.host]


@dataclass(frozen=True)
class WeightShard:
    """The range of a weight that one rank owns, in every shared copy."""

    memories: Sequence[SharedMemory]  # of this NUMA node, then of the others
    offset_bytes: int  # in each of the memories
    dtype: torch.dtype
    numel: int
    start: int  # in the whole weight
    row_numel: int
    trainable: bool
    decays: bool

    @cached_property
    def copies(self) -> list[Tensor]:
        """The range in each of the memories, flat [numel]."""
        return [memory.tensor(self.offset_bytes, (self.numel,), self.dtype) for memory in self.memories]

    def release_pages(self) -> None:
        """Return the pages that hold nothing but this range to the kernel; all ranks then read zeros."""
        first = -(-self.offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.offset_bytes + self.numel * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        for memory in self.memories:
            if first < last:
                memory.release_pages(first, last - first)


class SharedWeights:
    """Memory for all weights, one copy per NUMA node of the host."""

    def __init__(self, hosts: Hosts, weights: Sequence[Weight], touch: bool) -> None:
        """Share the memory. Collective over the host.

        Args:
            touch: allocate all pages now, on the NUMA node that uses them.
        """
        self._weights = weights
        self._offsets = [0]
        for weight in weights:
            self._offsets.append(self._offsets[-1] + align(weight.numel * weight.dtype.itemsize))
        local, others = hosts.share_per_numa_node(self._offsets[-1], touch=touch)
        self._memories = (local, *others)  # of this NUMA node, then of the others
        self.size_bytes = local.size_bytes

    def place(self, model: nn.Module) -> None:
        """Replace the model's meta parameters by views of this node's copy, tied ones by one view."""
        placed = {
            weight.name: nn.Parameter(self.view(index), requires_grad=weight.trainable)
            for index, weight in enumerate(self._weights)
        }
        aliases = {alias: placed[name] for alias, name in tied_weights(model).items()}
        replace_tensors(model, placed | aliases)

    def view(self, index: int) -> Tensor:
        """Return a weight in this node's copy."""
        weight = self._weights[index]
        return self._memories[0].tensor(self._offsets[index], weight.shape, weight.dtype)

    def shard(self, index: int, rank: int) -> WeightShard:
        """Return the range of a weight that `rank` owns."""
        weight = self._weights[index]
        start = weight.ranges[rank][0]
        return WeightShard(
            memories=self._memories,
            offset_bytes=self._offsets[index] + start * weight.dtype.itemsize,
            dtype=weight.dtype,
            numel=weight.shard_numel(rank),
            start=start,
            row_numel=weight.row_numel,
            trainable=weight.trainable,
            decays=decays(weight.name, weight.shape),
        )

    def check_published(self, rank: int, absent: Collection[int]) -> None:
        """Check that every rank reads the values that each owner has published. Collective.

        Args:
            rank: this rank.
            absent: weights that are not in memory now.

        Raises:
            SelfTestError: shared memory does not show a value of another rank.
        """
        views = [self.view(index).view(-1) for index in range(len(self._weights))]
        starts = [(index, *weight.ranges[rank]) for index, weight in enumerate(self._weights) if index not in absent]
        published = gather(
            [[index, start, float(views[index][start])] for index, start, stop in starts if start < stop]
        )
        for owner, values in enumerate(published):
            for index, start, value in values:
                seen = float(views[index][start])
                if seen != value and not math.isnan(value):  # NaN of a diverged weight arrives, but equals nothing
                    raise SelfTestError(
                        f"rank {owner} published {value} and this rank reads {seen}: broken shared memory?"
                    )
