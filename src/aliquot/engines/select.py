"""Select the engine of a run, and derive its settings from the configuration. The only file that knows all engines."""

from __future__ import annotations

from typing import Any

from aliquot.config.schema import RunConfig
from aliquot.data.workload import batch_size, micro_batch_tokens
from aliquot.distributed.topology import Topology
from aliquot.engines.base import Engine, EngineSpec, PhaseHooks
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from aliquot.engines.engine_choice import chosen_engine
from aliquot.engines.state_placement import SHARDED, OnDisk, Unsharded
from aliquot.machine.memory import memory_limit
from aliquot.models.meta import MetaModel


def engine_class(
    config: RunConfig, topology: Topology, numel: int, planned: str | None = None
) -> tuple[str, type[Engine]]:
    """Return the name and the class of the engine for a model of `numel` parameters, and import only that engine.

    Args:
        planned: the engine that the plan of rank 0 has chosen for `shard.engine: auto`; None without a plan.

    Raises:
        EngineError: the engine cannot follow a setting.
    """
    even = topology.world_size == topology.nodes * topology.local_world_size
    if config.shard.engine == "auto" and planned is not None and (even or planned != "host"):
        name = planned  # not by the memory of this node, because other nodes may have more or less
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
    hooks: PhaseHooks,
    on_disk: OnDisk | None = None,
    unsharded: Unsharded = SHARDED,
) -> EngineSpec:
    """Return the settings of `engine` for a model.

    Args:
        on_disk: the plan's state on disk.
        unsharded: the plan's state that stays whole within a step.
    """
    train = config.train
    settings: dict[str, Any] | None = None
    notes: list[str] = []
    if engine == "deepspeed":
        hidden_size = int(model.model.config.hidden_size)
        settings, notes = deepspeed_settings(config, topology.world_size, hidden_size)
    elif config.shard.deepspeed_config is not None:
        notes = [f"shard.deepspeed_config fills the config; engine {engine} ignores its other keys"]
    if engine != "host" and config.shard.reduce_dtype == "bf16":
        notes.append(f"shard.reduce_dtype: bf16 is for engine host; {engine} ignores it")
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
        hooks=hooks,
        deepspeed=settings,
        offload=config.shard.offload == "cpu",
        on_disk=on_disk,
        offload_directory=config.offload_directory,
        unsharded=unsharded if model.traits.packs else SHARDED,
        exact=model.exact - model.learned,
        notes=tuple(notes),
    )
