"""A node of a cluster as the pod sees it that a run has there: less what its daemonsets take."""

from __future__ import annotations

from dataclasses import replace

from aliquot.config.schema import RunConfig
from aliquot.planner.planned_machine import Machine


def in_pod(machine: Machine, config: RunConfig) -> Machine:
    """`machine`, where it is no EC2 type or `config` has no section `cluster`."""
    if config.cluster is None or (node := machine.instance) is None:
        return machine
    return replace(
        machine,
        cores=max(1, min(machine.cores, config.cluster.pod_cpus(node.allocatable_cpu_millicores))),
        memory_bytes=max(1, config.cluster.pod_memory_bytes(node.allocatable_memory_bytes)),
    )
