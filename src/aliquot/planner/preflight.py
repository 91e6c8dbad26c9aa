"""The plan that a training run makes before it allocates anything, and the refusal of runs that cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.core.errors import DoesNotFitError, FewerRanksFitError, PlanError, StorageError, UserError
from aliquot.core.on_rank_0 import RankGroup, run_on_rank_0
from aliquot.data.workload import Workload, batch_size
from aliquot.distributed.topology import RankLayout, Topology
from aliquot.machine.cpu import read_cpu
from aliquot.machine.torch_compile import compilation_failure
from aliquot.planner import fit_check
from aliquot.planner.advice import with_advice
from aliquot.planner.automatic_settings import with_choices, with_fixed_choices
from aliquot.planner.fit_check import full_disks
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine, measure_disks
from aliquot.planner.planned_model import PlannedModel
from aliquot.planner.planner import Planner
from aliquot.planner.settings_search import Search


@dataclass(frozen=True)
class PlanRequest:
    """The run to plan, as rank 0 knows it after reading the data."""

    config: RunConfig
    recorded: Mapping[str, object]  # choices for settings that are `auto`, in the checkpoint that the run resumes from
    topology: Topology
    allowed_cores: frozenset[int]  # cores of all ranks of this node; rank 0 itself is pinned to a few of these cores
    workload: Workload
    vocabulary: int
    steps_done: int  # steps in the checkpoint that the run resumes from
    memory_bytes: int  # memory of the node with the least memory


def plan_together(
    ranks: RankGroup, request: Callable[[], PlanRequest], force: bool, advise: bool, warn: Callable[[str], None]
) -> Plan | None:
    """Plan a run on rank 0 and return the plan on every rank. Collective; every rank raises the errors of `plan_run`.

    Args:
        request: makes the request; called on rank 0 only.
    """

    def plan_values() -> dict[str, Any] | None:
        plan = plan_run(request(), force, advise, warn)
        return None if plan is None else plan.as_json()

    values = run_on_rank_0(ranks, plan_values)
    return None if values is None else Plan.from_json(values)


def plan_run(request: PlanRequest, force: bool, advise: bool, warn: Callable[[str], None]) -> Plan | None:
    """Plan a run before it allocates anything, and refuse a run that cannot fit.

    Args:
        force: start the run even if it cannot fit.
        advise: append the most helpful change to the bottleneck; this makes about a dozen more plans.
        warn: receives a line if the run may not fit, and if no plan can be made.

    Returns:
        None if no plan can be made, because planning must not keep a run from starting.

    Raises:
        DoesNotFitError: the run cannot fit, even if the plan has the largest measured error.
        StorageError: the run would fill a disk.
        PlanError: no plan can be made, but offload to disk needs a plan.
    """
    config, workload, done, topology = request.config, request.workload, request.steps_done, request.topology
    try:
        local = Machine.local(read_cpu(allowed=request.allowed_cores))
        machine = measure_disks(replace(local, memory_bytes=request.memory_bytes), config)
        layout = RankLayout(
            topology.nodes, topology.local_world_size, topology.threads, topology.device, machine.numa_nodes
        )
        planner = Planner(PlannedModel(config, request.vocabulary), machine)
        plan = _plan_with_choices(planner, config, request.recorded, layout, workload, warn)
        config = with_fixed_choices(request.config, plan)
        search = Search(planner, config, layout, workload)
        plan = with_advice(plan, search, request.config) if advise else plan
        problems = "; ".join(fit_check.problems(plan, machine))
        refuse = fit_check.cannot_fit(plan) and not force
        advice = search.remedies(done) if problems and refuse else None
        kind = FewerRanksFitError if advice is not None and search.fits_with_fewer_ranks() else DoesNotFitError
        smallest = planner.plan_on_fewest_nodes(request.config, layout, workload)
        too_full = full_disks(config, plan, done) or (full_disks(config, smallest, done) if smallest else [])
    except UserError:
        raise
    except Exception as error:
        if config.shard.offload == "disk":
            raise PlanError(f"shard.offload: disk needs a plan, and none can be made: {error}") from error
        warn(f"no plan could be made of this run: {type(error).__name__}: {error}")
        return None
    if advice is not None:
        raise kind(f"this run would not fit: {problems}. {advice} (--force starts the run anyway)")
    if too_full and not force:
        raise StorageError(f"this run would fill a disk: {'; '.join(too_full)} (--force starts the run anyway)")
    if problems:
        warn(f"this run may not fit: {problems}")
    elif smallest is not None and (short := "; ".join(fit_check.problems(smallest, machine))):
        with_few = f"with {smallest.nodes} of its nodes left (launch.nodes {config.launch.nodes}), {short}"
        if fit_check.cannot_fit(smallest) and not force:
            raise DoesNotFitError(f"this run would not fit: {with_few}; raise MIN (--force starts the run anyway)")
        warn(f"this run may not fit: {with_few}")
    for concern in plan.concerns:
        warn(concern)
    return plan


def _plan_with_choices(
    planner: Planner,
    config: RunConfig,
    recorded: Mapping[str, object],
    layout: RankLayout,
    workload: Workload,
    warn: Callable[[str], None],
) -> Plan:
    """Plan a run with the recorded choices if the run still fits and spreads evenly, or else with new choices.

    Layers stay uncompiled if torch.compile fails on this machine.
    """
    resumed = with_choices(config, recorded)
    plan = planner.plan(resumed, layout, workload)
    if not (plan.fits and batch_size(resumed.train, layout.world_size).is_even(layout.world_size)):
        plan = planner.plan(config, layout, workload)
    compiles = config.train.compile == "auto" and plan.compile == "layers"
    if compiles and (failure := compilation_failure(layout.threads_per_rank)) is not None:
        warn(f"torch.compile fails here, so layers stay uncompiled: {failure}")
        plan = planner.plan(with_choices(config, {**plan.choices, "train.compile": "none"}), layout, workload)
    return plan
