"""Select the engine of a run, and derive the engine's settings. This is the only file that knows all engines.

Importing this file imports no torch, because the planner selects engines, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from aliquot.config.schema import RunConfig
from aliquot.core.errors import EngineError
from aliquot.data.workload import batch_size, micro_batch_tokens
from aliquot.engines.deepspeed.deepspeed_settings import deepspeed_settings
from aliquot.engines.engine_plan import SHARDED, OnDisk, Unsharded, is_single_gpu
from aliquot.machine.memory import memory_limit

if TYPE_CHECKING:
    from aliquot.distributed.topology import Topology
    from aliquot.engines.base import Engine, EngineSpec, PhaseHooks
    from aliquot.models.meta import MetaModel

_SHARED_FRACTION = 0.5  # with engine auto: the most of a machine's memory that engine host's weights may take


def chosen_engine(
    config: RunConfig, device: Literal["cpu", "cuda"], numel: int, memory_bytes: int, ranks: int, even: bool = True
) -> Literal["host", "fsdp", "deepspeed"]:
    """Return the engine for a model of `numel` parameters. Raises EngineError for an unsupported setting.

    `memory_bytes`: the memory of a host; `ranks`: of all hosts; `even`: all hosts have the same number of ranks.
    """
    name = config.shard.engine
    if name == "auto" and config.shard.deepspeed_config is not None:
        name = "deepspeed"
    elif name == "auto" and device == "cpu" and config.shard.offload == "disk":
        name = "host"
    elif name == "auto":
        fits = config.base != "bf16" or numel * config.train.compute_itemsize <= _SHARED_FRACTION * memory_bytes
        name = "host" if device == "cpu" and even and config.shard.collectives != "gloo" and fits else "fsdp"
    for message, applies in _refusals(config, device, name, ranks).items():
        if applies:
            raise EngineError(message)
    return name


def _refusals(config: RunConfig, device: str, engine: str, ranks: int) -> dict[str, bool]:
    """Return the error for each combination of settings that no engine supports, and whether `config` has it."""
    shard, train = config.shard, config.train
    replicates, offloads = shard.replicate == "nodes", shard.offload != "none"
    freezes = config.adapter is not None or bool(train.freeze)
    frozen = "adapter" if config.adapter is not None else "train.freeze"
    deepspeed, fsdp, host = (engine == name for name in ("deepspeed", "fsdp", "host"))
    return {
        "shard.offload: cpu is for GPUs: on CPU everything is in host memory already": shard.offload == "cpu"
        and device == "cpu",
        "shard.offload: cpu is for engines fsdp and deepspeed: engine host keeps all states in host memory anyway. Set"
        " shard.offload: none": shard.offload == "cpu" and host,
        f"shard.offload: disk needs shard.engine: host, not {engine}": shard.offload == "disk" and not host,
        f"{frozen} needs shard.engine: host or fsdp, not deepspeed": deepspeed and freezes,
        f"adapter.base: {config.base} keeps frozen weights in memory, and shard.offload: disk streams them in bf16:"
        " leave out one of the two": config.base != "bf16" and shard.offload == "disk",
        "train.compile: layers is for engines host and fsdp: DeepSpeed gathers each weight within a layer, which leaves"
        " nothing to fuse. Set train.compile: none": deepspeed and train.compile == "layers",
        f"train.objective: {train.objective} needs shard.engine: host or fsdp, not deepspeed": deepspeed
        and train.objective != "sft",
        "shard.collectives: gloo is for engine fsdp: engine host has shared memory only": host
        and shard.collectives == "gloo",
        f"train.optimizer_states: {train.optimizer_states} needs shard.engine: host, not {engine}": not host
        and train.optimizer_states != "fp32",
        f"shard.replicate: nodes needs shard.engine: fsdp, not {engine}": replicates and not fsdp,
        "shard.replicate: nodes adds gradients in fp32: leave out shard.reduce_dtype: bf16": replicates
        and shard.reduce_dtype != "fp32",
        "shard.replicate: nodes takes more memory of a GPU, and shard.offload: cpu is for too little of it: set one of"
        " the two to none": replicates and offloads,
        "train.fp8 is for GPUs: CPUs do not multiply in fp8. Leave it out": train.fp8 and device == "cpu",
        f"train.fp8 needs shard.engine: fsdp, not {engine}": train.fp8 and not fsdp,
        "train.fp8 needs shard.offload: none": train.fp8 and offloads,
        f"train.fp8 trains all weights: leave out {frozen} or train.fp8": train.fp8 and freezes,
        "train.fp8 is for one GPU, because nobody has measured it on several: leave it out": train.fp8 and ranks > 1,
    }


def engine_class(
    config: RunConfig, topology: Topology, numel: int, planned: str | None = None
) -> tuple[str, type[Engine]]:
    """Return the name and the class of the engine for a model of `numel` parameters, and import only that engine.

    `planned`: the engine in rank 0's plan for `shard.engine: auto`. Raises EngineError like `chosen_engine`.
    """
    even = topology.world_size == topology.nodes * topology.local_world_size
    if config.shard.engine == "auto" and planned is not None and (even or planned != "host"):
        name = planned  # this node's memory does not decide, because other nodes may have more or less
    else:
        name = chosen_engine(config, topology.device, numel, memory_limit(), topology.world_size, even)
    if name == "host":
        from aliquot.engines.host.host_engine import HostEngine

        return name, HostEngine
    if name == "deepspeed":
        from aliquot.engines.deepspeed.deepspeed_engine import DeepspeedEngine

        return name, DeepspeedEngine
    if is_single_gpu(config, topology.device, topology.world_size):
        from aliquot.engines.fsdp.single_gpu_engine import SingleGpuEngine

        return name, SingleGpuEngine
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
    """Return the settings of `engine` for a model. `on_disk` and `unsharded` are parts of the plan."""
    from aliquot.engines.base import EngineSpec

    train = config.train
    settings: dict[str, Any] | None = None
    notes: list[str] = []
    if engine == "deepspeed":
        hidden_size = int(model.model.config.hidden_size)
        settings, notes = deepspeed_settings(config, topology.world_size, hidden_size)
    elif config.shard.deepspeed_config is not None:
        notes = [f"shard.deepspeed_config fills the config; engine {engine} ignores its other keys"]
    if engine == "deepspeed" and config.shard.reduce_dtype == "bf16":
        notes.append("engine deepspeed ignores shard.reduce_dtype: set communication_data_type in its JSON")
    return EngineSpec(
        precision=train.chosen_precision,
        gradient_checkpointing=train.chosen_checkpointing,
        reduce_dtype=config.shard.reduce_dtype,
        micro_batches=batch_size(train, topology.world_size).micro_batches(
            topology.world_size, config.data.source_count
        ),
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        loraplus_lr_ratio=1.0 if config.adapter is None else config.adapter.loraplus_lr_ratio,
        optimizer_states=train.optimizer_states,
        micro_batch_tokens=micro_batch_tokens(config, topology.world_size),
        document_tokens=config.data.sequence_length,
        compile="layers" if train.compile == "layers" else "none",
        fp8=train.fp8,
        collectives=config.shard.collectives,
        fused_loss=model.traits.plain_head,
        packs=model.traits.packs,
        looks_up=model.traits.looks_up,
        dropout=model.dropout,
        hooks=hooks,
        deepspeed=settings,
        offload=config.shard.offload == "cpu",
        copies_weights=engine == "host" and topology.device == "cuda",
        on_disk=on_disk,
        offload_directory=config.offload_directory,
        unsharded=unsharded if model.traits.packs else SHARDED,
        replicates=config.shard.replicate == "nodes",
        base=model.base,
        compressed=model.compressed,
        exact=model.exact - model.learned,
        notes=tuple(notes),
    )
