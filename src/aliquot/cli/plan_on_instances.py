"""The plan of a config on EC2 nodes, for the commands that need one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aliquot.config.schema import RunConfig
    from aliquot.planner.plan import Plan


def plan_on(config: RunConfig, instance: str, nodes: int) -> Plan:
    """Raises UserError where there is no way to run `config` there."""
    return planner_of(config)(instance, nodes)


def planner_of(config: RunConfig) -> Callable[[str, int], Plan]:
    """`plan_on` for one config and many instance types: its model is built once, here.

    Raises UserError where there is no such model.
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
