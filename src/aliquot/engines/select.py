"""Which engine runs: the one place that knows them all."""

from __future__ import annotations

from aliquot.config.schema import RunConfig
from aliquot.engines.base import Engine
from aliquot.errors import EngineError
from aliquot.machine.memory import memory_limit
from aliquot.machine.topology import Topology

_SHARED_FRACTION = 0.5  # of a machine's memory that one copy of the weights may take


def engine_class(config: RunConfig, topology: Topology, numel: int) -> tuple[str, type[Engine]]:
    """The name and class of the engine for `shard.engine` and a model of `numel` parameters.

    Imports only the one that is used. Raises UserError for settings that the engine cannot follow.
    """
    name = config.shard.engine
    if name == "auto" and config.shard.deepspeed_config is not None:
        name = "deepspeed"
    elif name == "auto":
        name = "host" if _fits_host(config, topology, numel) else "fsdp"
    if config.shard.offload == "cpu" and topology.device == "cpu":
        raise EngineError("shard.offload: cpu is for GPUs: on CPU everything is in host memory already")
    if name == "host":
        if topology.device != "cpu":
            raise EngineError("shard.engine: host is for CPUs; with launch.device cuda use fsdp")
        if config.shard.collectives == "gloo":
            raise EngineError("shard.collectives: gloo is for engine fsdp: engine host has shared memory only")
        from aliquot.engines.host import HostEngine

        return "host", HostEngine
    if config.train.optimizer_states != "fp32":
        raise EngineError(
            f"train.optimizer_states: {config.train.optimizer_states} needs shard.engine: host, not {name}"
        )
    if name == "deepspeed":
        from aliquot.engines.deepspeed import DeepspeedEngine

        return "deepspeed", DeepspeedEngine
    from aliquot.engines.fsdp import FsdpEngine

    return "fsdp", FsdpEngine


def _fits_host(config: RunConfig, topology: Topology, numel: int) -> bool:
    """On CPU, where every host has as many ranks and one copy of the weights leaves room for the rest."""
    copy_bytes = numel * (2 if config.train.precision == "bf16" else 4)
    return (
        topology.device == "cpu"
        and config.shard.collectives != "gloo"
        and topology.world_size == topology.nodes * topology.local_world_size
        and copy_bytes <= _SHARED_FRACTION * memory_limit()
    )
