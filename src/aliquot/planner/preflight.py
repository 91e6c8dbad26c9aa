"""The plan that a training run makes of itself before it allocates anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.core.errors import DoesNotFitError, PlanError, StorageError, UserError
from aliquot.data.workload import Workload
from aliquot.distributed.rank_layout import RankLayout
from aliquot.distributed.topology import Topology
from aliquot.machine.cpu import read_cpu
from aliquot.planner import fit
from aliquot.planner.advice import with_advice
from aliquot.planner.disks import short_disks, with_disks
from aliquot.planner.fewest_nodes import with_fewest_nodes
from aliquot.planner.plan import PhaseMemory, Plan
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.search import remedies


def plan_before(
    config: RunConfig,
    topology: Topology,
    allowed_cores: frozenset[int],
    workload: Workload,
    vocabulary: int,
    force: bool,
    warn: Callable[[str], None],
    advise: bool,
    done: int,
    memory_bytes: int,
) -> dict[str, Any]:
    """The plan as JSON, and in `peak_bytes` what a rank will hold at most in each phase; of one that computes on a GPU
    that is GPU memory, and `host_peak_bytes` is the machine's. `advise`: also what would make it faster. `done`: steps
    behind the checkpoint that it goes on from; `memory_bytes`: of the node that has least.

    Raises UserError where they are too many even if the plan is as far off as plans have been, unless `force`; warns
    where that is not sure. A plan that cannot be made keeps no run from starting: it warns, and returns nothing.
    """
    try:
        machine = Machine.this(read_cpu(allowed=allowed_cores))  # the rank itself is pinned to a few of them
        machine = with_disks(replace(machine, memory_bytes=memory_bytes), config)
        layout = RankLayout(
            topology.nodes, topology.local_world_size, topology.threads, topology.device, machine.numa_nodes
        )
        planner = Planner(PlannedModel(config, vocabulary), machine)
        plan = planner.plan(config, layout, workload)
        plan = with_advice(plan, planner, config, layout, workload) if advise else plan
        found = "; ".join(fit.problems(plan, machine))
        advice = (
            remedies(planner, config, layout, workload, done) if found and fit.hopeless(plan) and not force else None
        )
        least = with_fewest_nodes(planner, config, layout, workload)
        full = "; ".join(short_disks(config, plan, done) or ([] if least is None else short_disks(config, least, done)))
    except UserError:
        raise
    except Exception as error:
        if config.shard.offload == "disk":
            raise PlanError(f"shard.offload: disk needs a plan, and none can be made: {error}") from error
        warn(f"no plan could be made of this run: {type(error).__name__}: {error}")
        return {}
    if advice is not None:
        raise DoesNotFitError(f"this run would not fit: {found}. {advice} (--force starts it all the same)")
    if full and not force:
        raise StorageError(f"this run would fill a disk: {full} (--force starts it all the same)")
    if found:
        warn(f"this run may not fit: {found}")
    elif least is not None and (short := "; ".join(fit.problems(least, machine))):
        told = f"with {least.nodes} of its nodes left (launch.nodes {config.launch.nodes}), {short}"
        if fit.hopeless(least) and not force:
            raise DoesNotFitError(f"this run would not fit: {told}; raise MIN (--force starts it all the same)")
        warn(f"this run may not fit: {told}")
    return plan.as_json() | {"peak_bytes": _peaks(plan.phases, plan), "host_peak_bytes": _peaks(plan.host_phases, plan)}


def _peaks(phases: tuple[PhaseMemory, ...], plan: Plan) -> dict[str, int]:
    return {phase.name: phase.per_rank(plan.ranks_per_node) for phase in phases}
