"""The one copy of the weights per NUMA node that all its ranks compute from: where each lies in it, and whose."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from aliquot.distributed.collectives.buffer_sizes import aligned
from aliquot.distributed.collectives.hosts import Hosts
from aliquot.distributed.collectives.shared_memory import Memory
from aliquot.models.materialise import replace_tensors, tied_weights
from aliquot.optim.adamw import decays


@dataclass(frozen=True)
class Weight:
    """One weight of the model, in the order of the engine's lists."""

    name: str
    shape: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]  # [rank]: the flat range that it owns
    learns: bool
    dtype: torch.dtype  # in which it is computed with

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[1:])

    def numel_of(self, rank: int) -> int:
        start, stop = self.ranges[rank]
        return stop - start

    def learned_of(self, rank: int) -> int:
        """How much of it has gradients and states there."""
        return self.numel_of(rank) if self.learns else 0


@dataclass(frozen=True)
class Owned:
    memories: Sequence[Memory]  # of this NUMA node, then of the others
    offset_bytes: int  # in each of them
    dtype: torch.dtype
    numel: int
    start: int  # in the whole weight
    row_numel: int
    learns: bool
    decays: bool

    @cached_property
    def copies(self) -> list[Tensor]:
        """Flat, [numel]."""
        return [memory.tensor(self.offset_bytes, (self.numel,), self.dtype) for memory in self.memories]

    def give_back(self) -> None:
        """The kernel gets back the pages that hold nothing else; they are zeros then, for all ranks."""
        first = -(-self.offset_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (self.offset_bytes + self.numel * self.dtype.itemsize) // mmap.PAGESIZE * mmap.PAGESIZE
        for memory in self.memories:
            if first < last:
                memory.give_back(first, last - first)


class SharedWeights:
    def __init__(self, hosts: Hosts, weights: Sequence[Weight], touch: bool) -> None:
        """`touch`: have its pages now, on their node. Collective over the host."""
        self._weights = weights
        self._offsets = [0]
        for weight in weights:
            self._offsets.append(self._offsets[-1] + aligned(weight.numel * weight.dtype.itemsize))
        own, others = hosts.share_per_numa_node(self._offsets[-1], touch=touch)
        self._memories = (own, *others)  # of this NUMA node, then of the others
        self.size_bytes = own.size_bytes

    def place(self, model: nn.Module) -> None:
        """Replace the meta parameters by views of this node's copy; tied ones by one and the same."""
        placed = {
            weight.name: nn.Parameter(self.view(index), requires_grad=weight.learns)
            for index, weight in enumerate(self._weights)
        }
        aliases = {alias: placed[name] for alias, name in tied_weights(model).items()}
        replace_tensors(model, placed | aliases)

    def view(self, index: int) -> Tensor:
        """A weight in this node's copy."""
        weight = self._weights[index]
        return self._memories[0].tensor(self._offsets[index], weight.shape, weight.dtype)

    def ranges(self, index: int, rank: int) -> list[Tensor]:
        """What `rank` owns of a weight, flat, in every copy."""
        return self.owned(index, rank).copies

    def owned(self, index: int, rank: int) -> Owned:
        weight = self._weights[index]
        start = weight.ranges[rank][0]
        return Owned(
            memories=self._memories,
            offset_bytes=self._offsets[index] + start * weight.dtype.itemsize,
            dtype=weight.dtype,
            numel=weight.numel_of(rank),
            start=start,
            row_numel=weight.row_numel,
            learns=weight.learns,
            decays=decays(weight.name, weight.shape),
        )
