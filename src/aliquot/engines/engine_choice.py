"""Resolve `shard.engine: auto`, and reject settings that an engine cannot follow. Imports no torch."""

from __future__ import annotations

from typing import Literal

from aliquot.config.schema import RunConfig
from aliquot.core.errors import EngineError

_SHARED_FRACTION = 0.5  # the part of a machine's memory that one copy of the weights may take


def chosen_engine(
    config: RunConfig, device: Literal["cpu", "cuda"], numel: int, memory_bytes: int, even: bool = True
) -> Literal["host", "fsdp", "deepspeed"]:
    """Return the engine for a model of `numel` parameters.

    Args:
        memory_bytes: of a host.
        even: all hosts have the same number of ranks.

    Raises:
        EngineError: the engine cannot follow a setting.
    """
    name = config.shard.engine
    if name == "auto" and config.shard.deepspeed_config is not None:
        name = "deepspeed"
    elif name == "auto" and config.shard.offload == "disk" and device == "cpu":
        name = "host"
    elif name == "auto":
        copy_bytes = numel * (2 if config.train.precision == "bf16" else 4)
        suits = device == "cpu" and even and config.shard.collectives != "gloo"
        name = "host" if suits and copy_bytes <= _SHARED_FRACTION * memory_bytes else "fsdp"
    if config.shard.offload == "cpu" and device == "cpu":
        raise EngineError("shard.offload: cpu is for GPUs: on CPU everything is in host memory already")
    if config.shard.offload == "disk" and name != "host":
        raise EngineError(f"shard.offload: disk needs shard.engine: host on CPUs, not {name} on {device}")
    if name == "deepspeed" and (config.adapter is not None or config.train.freeze):
        frozen = "adapter" if config.adapter is not None else "train.freeze"
        raise EngineError(f"{frozen} needs shard.engine: host or fsdp, not deepspeed")
    if name == "host" and device != "cpu":
        raise EngineError("shard.engine: host is for CPUs; with launch.device cuda use fsdp")
    if name == "host" and config.shard.collectives == "gloo":
        raise EngineError("shard.collectives: gloo is for engine fsdp: engine host has shared memory only")
    if name != "host" and config.train.optimizer_states != "fp32":
        raise EngineError(
            f"train.optimizer_states: {config.train.optimizer_states} needs shard.engine: host, not {name}"
        )
    return name
