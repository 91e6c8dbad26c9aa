"""Who is connected to whom, and how: a line for each group of ranks when a run starts."""

from __future__ import annotations

import platform

from aliquot.distributed.collectives.peers import host_identity
from aliquot.distributed.gloo_interface import address_of, gloo_interface
from aliquot.distributed.ranks import Ranks


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
