"""Plan a run from its configuration alone, for this or any other machine, without reading any weights."""

from __future__ import annotations

from dataclasses import replace

from aliquot.config.schema import RunConfig
from aliquot.core.errors import EngineError
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.engines.select import chosen_engine
from aliquot.planner import fit_check
from aliquot.planner.automatic_settings import (
    plan_compiled_if_it_pays,
    plan_with_fast_micro_batch,
    plan_with_least_recomputation,
    plan_with_regular_saves,
    with_settings,
)
from aliquot.planner.machine_profile import ensure_measured
from aliquot.planner.plan import Plan
from aliquot.planner.planned_machine import Machine
from aliquot.planner.planned_model import PlannedModel, with_model_limits
from aliquot.planner.run_plan import ModelOnMachine, RunPlan


def plan(
    config: RunConfig,
    machine: Machine | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    workload: Workload | None = None,
) -> Plan:
    """Plan the memory and time of a run without reading weights or data.

    Args:
        config: the run configuration.
        machine: the kind of machine. Default: this machine, whose speed is measured once and stored.
        nodes: the number of machines. Default: `launch.nodes`.
        ranks_per_node: the ranks on each machine. Default: `launch.ranks`.
        workload: the lengths of the documents. Default: every document has `data.sequence_length` tokens.

    Returns:
        The plan, also if the run does not fit into memory: see `Plan.fits`.

    Raises:
        UserError: the config is invalid; training would raise the same error.
    """
    machine = machine or Machine.local()
    layout = machine.layout(config, nodes, ranks_per_node)
    config = with_model_limits(config)
    ensure_measured(machine, layout)
    return Planner(PlannedModel(config), machine).plan(config, layout, workload or Workload.assumed(config))


class Planner(ModelOnMachine):
    """Plans runs of one model on one kind of machine: chooses the engine and the settings that are `auto`."""

    def plan(self, config: RunConfig, layout: RankLayout, workload: Workload, approximate: bool = False) -> Plan:
        """Plan a run.

        `shard.engine: auto` falls back from engine host to engine fsdp if only fsdp fits. Engine host may need more
        memory, because each node keeps a copy of the weights and, on several nodes, gradient sums for the other nodes.

        Args:
            approximate: extrapolate micro-batches of more than two sequences, to make many plans in little time.
        """

        def plan_of(changed: RunConfig) -> Plan:
            return self.plan(changed, layout, workload, approximate)

        if config.train.precision == "auto":
            return plan_of(with_settings(config, {"train.precision": self.machine.faster_precision(layout.device)}))
        if config.checkpoint.every == "auto":
            return plan_with_regular_saves(config, plan_of)
        if config.train.gradient_checkpointing == "auto":
            return plan_with_least_recomputation(config, self.engine(config, layout), plan_of)
        if config.train.per_device_train_batch_size == "auto":
            must_be_1 = self.shape.depends_on_micro_batches
            return plan_with_fast_micro_batch(config, layout.world_size, must_be_1, plan_of)
        if config.train.compile == "auto":
            return plan_compiled_if_it_pays(config, self.machine.can_compile, plan_of)

        def plan_with(engine: str) -> Plan:
            return RunPlan(self, config, engine, layout, workload, approximate).make()

        def fits(made: Plan) -> bool:
            return not fit_check.problems(made, self.machine)

        engine, shard = self.engine(config, layout), config.shard
        made = plan_with(engine)
        # Engine fsdp has shared memory on a single node only, and neither compressed states nor offload to disk.
        needs_host = shard.collectives == "shared_memory" or config.train.optimizer_states != "fp32"
        may_change = shard.engine == "auto" and engine == "host" and shard.offload != "disk" and not needs_host
        if not may_change or fits(made):
            return made
        changed = plan_with("fsdp")
        return changed if fits(changed) else made

    def plan_on_fewest_nodes(self, config: RunConfig, layout: RankLayout, workload: Workload) -> Plan | None:
        """Plan an elastic run on its minimum number of nodes, because each node then needs the most memory.

        None if the number of nodes is fixed, or if `layout` has the minimum number already.
        """
        fewest = config.launch.fewest_nodes
        if not config.launch.is_elastic or fewest >= layout.nodes:
            return None
        return self.plan(config, replace(layout, nodes=fewest), workload)

    def engine(self, config: RunConfig, layout: RankLayout) -> str:
        """Return the engine of the config, whether or not it fits. Raises UserError for settings that exclude it."""
        if config.train.fp8 and layout.device == "cuda" and not self.machine.gpu_has_fp8:
            raise EngineError(
                f"train.fp8: GPUs multiply in fp8 from Ada and Hopper on, and {self.machine.name} has"
                f" {(self.machine.gpu_name or '').upper()}: leave it out, or take newer GPUs"
            )
        return chosen_engine(config, layout.device, self.shape.numel, self.machine.memory_bytes, layout.world_size)
