"""Whether a plan fits what its machines have, and by how much not."""

from __future__ import annotations

from aliquot.config.schema import RunConfig
from aliquot.core.errors import DoesNotFitError
from aliquot.planner.engine_memory import START_PRIVATE_BYTES, START_SHARED_BYTES, beside_bytes
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine

# Plans of peak memory have been off by up to this much: benchmarks/foresight.py.
UNCERTAINTY = 0.08


def hopeless(plan: Plan) -> bool:
    """It does not fit even if the plan is as much too high as plans have been."""
    of_host = plan.host_peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.host_limit_bytes
    return of_host or plan.peak_bytes_per_rank * (1 - UNCERTAINTY) > plan.limit_bytes


def check_start(config: RunConfig, ranks: int, memory_bytes: int) -> None:
    """Before any rank of a node starts: later ones make a plan, but only if all of them live until then.

    Raises DoesNotFitError where `memory_bytes`, those of the node, do not hold `ranks` processes without a model.
    """
    needed = ranks * START_PRIVATE_BYTES + START_SHARED_BYTES + beside_bytes(config, ranks)
    if needed * (1 - UNCERTAINTY) > memory_bytes:
        raise DoesNotFitError(
            f"this run would not fit: the processes of {ranks} ranks need {_gib(needed)} of memory before they have a"
            f" model, and this machine or container has {_gib(memory_bytes)}. Lower launch.ranks (--force starts it all"
            " the same)"
        )


def problems(plan: Plan, machine: Machine) -> list[str]:
    """Each thing that is short, in words; none: it fits."""
    found = []
    if plan.peak_bytes_per_rank > plan.limit_bytes:
        peak, limit = plan.peak_bytes_per_rank, plan.limit_bytes
        beside = f", of which the processes beside them have {_gib(plan.beside_bytes)}" if plan.beside_bytes else ""
        where = "of GPU memory" if plan.device == "cuda" else "of memory"
        found.append(
            f"a rank needs {_gib(peak)} {where} in the phase `{plan.peak.name}` and can have {_gib(limit)}"
            f" ({plan.ranks_per_node} a node of {_gib(plan.limit_bytes_per_node)}{beside}):"
            f" {_gib(peak - limit)} too much"
        )
    if plan.host_peak_bytes_per_rank > plan.host_limit_bytes:
        peak, limit = plan.host_peak_bytes_per_rank, plan.host_limit_bytes
        found.append(
            f"a rank needs {_gib(peak)} of the machine's memory beside its GPU's and can have {_gib(limit)}"
            f" ({plan.ranks_per_node} a node of {_gib(plan.host_limit_bytes_per_node)}): {_gib(peak - limit)} too much"
        )
    if machine.shm_bytes is not None and plan.shm_bytes_per_node > machine.shm_bytes:
        found.append(f"/dev/shm has {_gib(machine.shm_bytes)} and {_gib(plan.shm_bytes_per_node)} are needed there")
    return found


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB"
