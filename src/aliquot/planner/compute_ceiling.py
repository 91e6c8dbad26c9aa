"""What the ranks of a run reach on their machines: known from a run before, or measured by all of them together."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Literal, NamedTuple

from aliquot.distributed.ranks import Ranks
from aliquot.machine.allocator import release_free_memory
from aliquot.machine.cpu import read_cpu
from aliquot.machine.matmul import matmul_rate
from aliquot.planner import profiles
from aliquot.planner.measure_rates import QUICK, measure_rates, medians


class Ceiling(NamedTuple):
    flops_per_s: float  # of all ranks together in plain matrix products
    is_sure: bool  # False: the machine had other work while it was measured


def ceiling(ranks: Ranks, precision: Literal["bf16", "fp32"], again: bool = False) -> Ceiling:
    """What plain matrix products reach here. Collective.

    On CPU it is measured with all else that plans go by, about a second, and kept for runs and plans of the next hour;
    `again`: although it is known.
    """
    topology = ranks.topology
    if topology.device == "cuda":
        return Ceiling(sum(ranks.gather(matmul_rate("cuda", precision, ranks.barrier))), True)
    cpu = read_cpu(allowed=ranks.allowed_cores)
    layout = (topology.local_world_size, topology.threads)
    tables = None if again else profiles.quick(cpu, *layout)
    if not all(ranks.gather(tables is not None)):
        of_core = min(1.0, cpu.usable_cores / math.prod(layout))
        own = measure_rates(lambda value: max(ranks.gather(value)), QUICK, of_core)
        release_free_memory()  # matrices of tens of megabytes: a run that measures holds no more than one that does not
        found = ranks.gather([topology.node_rank, own])
        tables = medians([told for node, told in found if node == topology.node_rank])
        if topology.local_rank == 0:
            with suppress(OSError):  # then the next run measures, too
                profiles.keep_quick(cpu, *layout, tables)
        ranks.barrier()
    assert tables is not None
    told = ranks.gather([profiles.ceiling(tables, 2 if precision == "bf16" else 4), profiles.is_busy(tables)])
    return Ceiling(sum(rate for rate, _ in told), not any(busy for _, busy in told))
