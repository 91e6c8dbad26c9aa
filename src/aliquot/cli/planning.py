"""The plan of a config on EC2 nodes, for the commands that need one."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from aliquot.errors import UserError

if TYPE_CHECKING:
    from aliquot.config.plan import Plan
    from aliquot.config.schema import RunConfig


def plan_on(config: RunConfig, instance: str, nodes: int) -> Plan:
    """Raises UserError where there is no way to run `config` there, or no planner in this version."""
    if find_spec("aliquot.plan") is None:
        raise UserError("this version of aliquot has no planner, which this command needs")
    machine = import_module("aliquot.plan.machine").Machine.of_instance(instance)
    planned: Plan = import_module("aliquot.plan.planner").plan(config, machine, nodes=nodes)
    return planned
