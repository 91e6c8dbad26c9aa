"""Plan a config on EC2 nodes, for the commands that need such a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aliquot.config.schema import RunConfig
    from aliquot.planner.plan import Plan


def plan_on_instance(config: RunConfig, instance: str, nodes: int) -> Plan:
    """Return the plan of `config` on `nodes` nodes of an EC2 type. Raises UserError if `config` cannot run there."""
    return instance_planner(config)(instance, nodes)


def instance_planner(config: RunConfig) -> Callable[[str, int], Plan]:
    """Return `plan_on_instance` for one config and many instance types, which builds the model once.

    Raises UserError if the model does not exist.
    """
    from aliquot.data.workload import Workload
    from aliquot.planner.planned_machine import Machine, limit_to_pod
    from aliquot.planner.planned_model import PlannedModel
    from aliquot.planner.planner import Planner

    model = PlannedModel(config)

    def plan(instance: str, nodes: int) -> Plan:
        machine = limit_to_pod(Machine.from_instance(instance), config)
        return Planner(model, machine).plan(config, machine.layout(config, nodes), Workload.assumed(config))

    return plan
