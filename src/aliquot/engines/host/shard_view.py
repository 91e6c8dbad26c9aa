"""A rank's range of a weight in the shared copies that all ranks compute from."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from aliquot.distributed.collectives.shared import Memory


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
