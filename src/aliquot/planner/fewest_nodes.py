"""The plan for the fewest nodes that may be left of a run whose nodes come and go: each of them then holds most."""

from __future__ import annotations

from dataclasses import replace

from aliquot.config.schema import RunConfig
from aliquot.data.workload import Workload
from aliquot.distributed.topology import RankLayout
from aliquot.planner.plan import Plan
from aliquot.planner.planner import Planner


def with_fewest_nodes(planner: Planner, config: RunConfig, layout: RankLayout, workload: Workload) -> Plan | None:
    """None where `layout` has no more already. Raises UserError as the planner does."""
    fewest = config.launch.fewest_nodes
    if not config.launch.nodes_may_change or fewest >= layout.nodes:
        return None
    return planner.plan(config, replace(layout, nodes=fewest), workload)
