"""Which engine runs: the one place that knows them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.data.batch_size import batch_size, micro_batch_tokens
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from aliquot.engines.engine_choice import chosen_engine
from aliquot.engines.state_placement import SHARDED, OnDisk, Unsharded
from aliquot.machine.memory import memory_limit
from aliquot.models.meta import MetaModel


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


def engine_spec(
    config: RunConfig,
    topology: Topology,
    engine: str,
    model: MetaModel,
    phase: Callable[[str], None],
    building: Callable[[str], object],
    on_disk: OnDisk | None = None,
    unsharded: Unsharded = SHARDED,
) -> EngineSpec:
    train = config.train
    settings: dict[str, Any] | None = None
    notes: list[str] = []
    if engine == "deepspeed":
        hidden_size = int(model.model.config.hidden_size)
        settings, notes = deepspeed_settings(config, topology.world_size, hidden_size)
    elif config.shard.deepspeed_config is not None:
        notes = [f"shard.deepspeed_config fills the config; engine {engine} has no use for the rest of it"]
    if engine != "host" and config.shard.reduce_dtype == "bf16":
        notes.append(f"shard.reduce_dtype: bf16 is for engine host; {engine} reduces as it does without")
    return EngineSpec(
        precision=train.precision,
        gradient_checkpointing=train.gradient_checkpointing,
        reduce_dtype=config.shard.reduce_dtype,
        micro_batches=batch_size(train, topology.world_size).micro_batches(
            topology.world_size, config.data.source_count
        ),
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        optimizer_states=train.optimizer_states,
        micro_batch_tokens=micro_batch_tokens(config, topology.world_size),
        document_tokens=config.data.sequence_length,
        compile=train.compile,
        collectives=config.shard.collectives,
        fused_loss=model.traits.plain_head,
        packs=model.traits.packs,
        looks_up=model.traits.looks_up,
        dropout=model.dropout,
        phase=phase,
        building=building,
        deepspeed=settings,
        offload=config.shard.offload == "cpu",
        on_disk=on_disk,
        offload_directory=config.offload_directory,
        unsharded=unsharded if model.traits.packs else SHARDED,
        exact=model.exact - model.learned,
        notes=tuple(notes),
    )
