"""Change settings of a run, and choose the settings that are `auto`, by comparing plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

from aliquot.config.schema import RunConfig
from aliquot.core.errors import UnsupportedModelError
from aliquot.data.workload import BatchSize
from aliquot.planner.memory_plan import UNCERTAINTY
from aliquot.planner.plan import Plan

PlanOf = Callable[[RunConfig], Plan]

# For each setting that may be `auto`, the value without a plan; train.precision needs none (run/resolved_run.py)
NO_CHOICES: dict[str, object] = {
    "train.gradient_checkpointing": "none", "train.compile": "none", "train.per_device_train_batch_size": 1,
    "shard.replicate": "none", "checkpoint.every": 500,
}  # fmt: skip

_MICRO_BATCHES = (2, 4, 8, 16, 32)  # sequences; also tried is all that a rank has, if that is less
_CLEAR_GAIN = 1.05  # a larger micro-batch, or recomputation that the run fits without, must save this factor of time
_COMPILE_WORTH_S = 300.0  # `train.compile: auto` compiles to save this; the compilation itself takes up to two minutes
_COMPILE_GAIN = 0.01  # of a step; decides instead if the number of steps is unknown
_SAVE_EVERY_S = 1800.0
_SAVING_SHARE = 0.05  # of the time of a run, at most, that `checkpoint.every: auto` lets training wait for saves


def with_settings(config: RunConfig, settings: Mapping[str, object]) -> RunConfig:
    """Return the config with each `section.key` set to its value.

    Setting the global batch size clears the gradient accumulation steps, which would contradict this size.
    """
    sections: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    if "train.global_batch_size" in settings:
        sections["train"]["gradient_accumulation_steps"] = None
    changed = {name: getattr(config, name).model_copy(update=update) for name, update in sections.items()}
    return config.model_copy(update=changed)


def setting(config: RunConfig, key: str) -> object:
    """Return the value of `section.key`."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def with_choices(config: RunConfig, choices: Mapping[str, object]) -> RunConfig:
    """Return the config with each `section.key` of `choices` that is `auto` set to its chosen value."""
    return with_settings(config, {key: value for key, value in choices.items() if setting(config, key) == "auto"})


def with_fixed_choices(config: RunConfig, plan: Plan) -> RunConfig:
    """Return the config with the choices of its plan fixed, for a search over other settings.

    Activation checkpointing stays `auto`, because with other settings another value may be the least that fits.
    """
    return with_choices(config, plan.choices | {"train.gradient_checkpointing": "auto"})


def plan_with_least_recomputation(config: RunConfig, engine: str, plan_of: PlanOf) -> Plan:
    """Plan a run with `train.gradient_checkpointing: auto`: it recomputes no more than memory requires.

    Memory also requires another engine than `engine`, states on disk, or copied layers. If more recomputation avoids
    this and makes a step clearly faster, the run recomputes more.
    """
    plan = plan_of(with_settings(config, {"train.gradient_checkpointing": "none"}))
    for kind in ("selective", "full"):
        if plan.fits and plan.engine == engine and not plan.on_disk and not plan.copied_layers:
            break
        with suppress(UnsupportedModelError):  # the model does not support this kind
            more = plan_of(with_settings(config, {"train.gradient_checkpointing": kind}))
            if not plan.fits or (more.fits and more.step_with_messages_s * _CLEAR_GAIN <= plan.step_with_messages_s):
                plan = more
    return plan


def plan_with_fast_micro_batch(config: RunConfig, world_size: int, must_be_1: bool, plan_of: PlanOf) -> Plan:
    """Plan a run with `train.per_device_train_batch_size: auto`.

    The micro-batch grows if that makes a step clearly faster, while the run surely fits into memory.
    """

    def with_size(size: int) -> Plan:
        return plan_of(with_settings(config, {"train.per_device_train_batch_size": size}))

    plan = with_size(1)
    for size in () if must_be_1 else larger_micro_batches(config, world_size):
        larger = with_size(size)
        surely_fits = larger.fits and larger.peak_bytes_per_rank <= (1 - UNCERTAINTY) * larger.limit_bytes
        if not surely_fits:
            break
        if larger.step_with_messages_s * _CLEAR_GAIN <= plan.step_with_messages_s:
            plan = larger
    return plan


def larger_micro_batches(config: RunConfig, world_size: int) -> Iterator[int]:
    """Yield sizes above 1 of a micro-batch that is `auto`, in ascending order, for the same global batch.

    No rank gets more sequences. Only a global batch that is set leaves a choice, and only without gradient accumulation
    steps.
    """
    train = config.train
    is_automatic = train.per_device_train_batch_size == "auto" and train.gradient_accumulation_steps is None
    if train.global_batch_size is None or not is_automatic:
        return
    share = -(-train.global_batch_size // world_size)
    for size in sorted({*_MICRO_BATCHES, min(share, max(_MICRO_BATCHES))}):
        if BatchSize(train.global_batch_size, size).is_even(world_size):
            yield size


def plan_compiled_if_it_pays(config: RunConfig, can_compile: bool, plan_of: PlanOf) -> Plan:
    """Plan a run with `train.compile: auto`: layers are compiled if this saves some minutes of the whole run."""
    plan = plan_of(with_settings(config, {"train.compile": "none"}))
    training_s = plan.steps * plan.step_with_messages_s
    if not can_compile or plan.engine == "deepspeed" or 0 < training_s < _COMPILE_WORTH_S:
        return plan
    faster = plan_of(with_settings(config, {"train.compile": "layers"}))
    gain = 1 - faster.step_with_messages_s / plan.step_with_messages_s
    pays = gain * training_s >= _COMPILE_WORTH_S if plan.steps else gain >= _COMPILE_GAIN
    return faster if pays and (faster.fits or not plan.fits) else plan


def plan_with_regular_saves(config: RunConfig, plan_of: PlanOf) -> Plan:
    """Plan a run with `checkpoint.every: auto`. It saves only at its end if it does not fit into memory otherwise.

    A training step waits for the part of an asynchronous save that exceeds the buffers.
    """
    plan = plan_of(with_settings(config, {"checkpoint.every": 0}))
    buffers = config.checkpoint.asynchronous * plan.nodes * plan.ranks_per_node * config.checkpoint.buffer_bytes
    waiting_s = max(0, plan.checkpoint_bytes - buffers) / plan.storage_bytes_per_s
    steps = max(_SAVE_EVERY_S, plan.save_s, waiting_s / _SAVING_SHARE) / plan.step_s
    saving = plan_of(with_settings(config, {"checkpoint.every": max(1, int(float(f"{steps:.2g}")))}))
    return saving if saving.fits or not plan.fits else plan
