"""Which engine runs: the one place that knows them all."""

from __future__ import annotations

from aliquot.config.engine_choice import chosen_engine
from aliquot.config.schema import RunConfig
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine
from aliquot.machine.memory import memory_limit


def engine_class(
    config: RunConfig, topology: Topology, numel: int, planned: str | None = None
) -> tuple[str, type[Engine]]:
    """The name and class of the engine for `shard.engine` and a model of `numel` parameters.

    `planned`: what `auto` is by the run's plan, which rank 0 has made for all: fsdp where host does not fit; None where
    there is none. Imports only the one that is used. Raises UserError for settings that the engine cannot follow.
    """
    even = topology.world_size == topology.nodes * topology.local_world_size
    if config.shard.engine == "auto" and planned is not None and (even or planned != "host"):
        name = planned  # not by what this node has: on others it would be another one
    else:
        name = chosen_engine(config, topology.device, numel, memory_limit(), even)
    if name == "host":
        from aliquot.engines.host.host_engine import HostEngine

        return name, HostEngine
    if name == "deepspeed":
        from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine

        return name, DeepspeedEngine
    from aliquot.engines.fsdp.fsdp_engine import FsdpEngine

    return name, FsdpEngine
