"""Measure the compute ceiling, the denominator of MFU: FLOP/s of plain matrix products on the machines of a run."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import asdict
from typing import Literal, NamedTuple

from aliquot.distributed.ranks import Ranks
from aliquot.machine.allocator import release_free_memory
from aliquot.machine.cpu import read_cpu
from aliquot.machine.matmul import matmul_rate
from aliquot.planner import machine_profile
from aliquot.planner.measure_rates import QUICK, measure_rates, median_measurement


class Ceiling(NamedTuple):
    """The measured rate of plain matrix products, the denominator of MFU."""

    flops_per_s: float  # of all ranks together
    is_sure: bool  # False: the machine had other work during the measurement


def ceiling(ranks: Ranks, precision: Literal["bf16", "fp32"], again: bool = False) -> Ceiling:
    """Return the compute ceiling of all ranks. Collective.

    On CPU the measurement takes about a second, because it covers all rates that plans use.

    Args:
        again: measure even if the cache has a valid profile.
    """
    topology = ranks.topology
    if topology.device == "cuda":
        return Ceiling(sum(ranks.gather(matmul_rate("cuda", precision, ranks.barrier))), True)
    cpu = read_cpu(allowed=ranks.allowed_cores)
    layout = (topology.local_world_size, topology.threads)
    profile = None if again else machine_profile.recent(cpu, *layout)
    if not all(ranks.gather(profile is not None)):
        core_share = min(1.0, cpu.usable_cores / math.prod(layout))
        measured = measure_rates(lambda value: max(ranks.gather(value)), QUICK, core_share)
        release_free_memory()  # tens of megabytes, which would otherwise count as memory of the run
        everywhere = ranks.gather([topology.node_rank, asdict(measured)])
        here = median_measurement([rates for node, rates in everywhere if node == topology.node_rank])
        if topology.local_rank == 0:
            with suppress(OSError):  # without a stored profile, the next run measures again
                machine_profile.keep(cpu, *layout, here)
        ranks.barrier()
        profile = machine_profile.profile_of(*layout, here)
    assert profile is not None
    rates = ranks.gather([profile.ceiling(2 if precision == "bf16" else 4), profile.is_busy])
    return Ceiling(sum(rate for rate, _ in rates), not any(busy for _, busy in rates))
