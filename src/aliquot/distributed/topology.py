"""Which rank this process is, on which node, with which cores and device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Topology:
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    device: Literal["cpu", "cuda"]
    threads: int  # of the intra-op pool
    cores: tuple[int, ...]  # this rank is pinned to these; empty: not pinned

    @property
    def is_first(self) -> bool:
        """Rank 0: the one that talks and writes what exists once."""
        return self.rank == 0
