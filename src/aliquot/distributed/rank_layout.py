"""How a run is spread: nodes, ranks, threads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RankLayout:
    nodes: int
    ranks_per_node: int
    threads_per_rank: int
    device: Literal["cpu", "cuda"]
    numa_nodes: int = 1  # of a node

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node
