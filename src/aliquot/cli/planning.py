"""The plan of a config on EC2 nodes, for the commands that need one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aliquot.config.plan import Plan
    from aliquot.config.schema import RunConfig


def plan_on(config: RunConfig, instance: str, nodes: int) -> Plan:
    """Raises UserError where there is no way to run `config` there."""
    from aliquot.plan.machine import Machine
    from aliquot.plan.planner import plan

    return plan(config, Machine.of_instance(instance), nodes=nodes)
